"""Wrong and hostile configurations, each with the message that answers it."""

# name -> (YAML, the parts of the message, in their order, with … between them)
BAD: dict[str, tuple[str | bytes, str]] = {
    "unknown key": ("model:\n  detph: 6\n",
     "f.yaml:2:3: model.detph: found the unknown key 'detph'; did you mean 'depth'?"),
    "dotted key": (
        "model.norm.kind: rms\n",
        "f.yaml:1:1: model.norm.kind: … files nest their keys: model: {norm: {kind: …}}",
    ),
    "dotted key in a section": (
        "model:\n  norm.kind: rms\n",
        "f.yaml:2:3: model.norm.kind: … files nest their keys: norm: {kind: …}",
    ),
    "dotted key that repeats its section": (
        "model:\n  model.depth: 3\n",
        "f.yaml:2:3: model.model.depth: … files nest their keys: depth: …",
    ),
    "key of another section": ("depth: 6\n", "f.yaml:1:1: depth: … did you mean 'model.depth'?"),
    "option of a scheme": ("model: {power: 1}",
     "f.yaml:1:9: model.power: … an option of a scheme: model.scheme_options.power"),
    "key below a key": ("seed: {x: 1}", "f.yaml:1:7: seed: found a section; allowed an integer"),
    "duplicate key in a section": ("train:\n  lr: 1\n  lr: 2",
     "f.yaml:3:3: train.lr: found the key twice (first on line 2)"),
    "unknown role": ("train: {lr_factors: {norm_gian: 1}}",
     "f.yaml:1:22: train.lr_factors.norm_gian: found the key … did you mean 'norm_gain'?"),
    "unknown role in a list": ("train:\n  trainable:\n    - q\n    - embeding\n",
     "f.yaml:4:7: train.trainable[1]: found 'embeding'; allowed q, k, … did you mean "
     "'embedding'?"),
    "text for an integer": ('model:\n  depth: "12"',
     "f.yaml:2:10: model.depth: found '12'; allowed an integer from 1 to 1000000"),
    "word for a number": ("train: {lr: fast}", "train.lr: found 'fast'; allowed a number above 0"),
    "yes": ("runtime:\n  banks: yes",
     "f.yaml:2:10: runtime.banks: found 'yes'; allowed true or false"),
    "a blank in a name": ("name: my study", "name: found 'my study'; allowed letters, digits"),
    "nothing": ("seed:\n", "f.yaml:1:6: seed: found nothing; allowed an integer"),
    "wrong literal": ("train: {precision: BF61}",
     "found 'BF61'; allowed fp32, bf16; did you mean 'bf16'?"),
    "one beta": ("train: {betas: [0.9]}", "train.betas: found the list [0.9]; allowed a list of 2"),
    "a beta too large": ("train: {betas: [0.9, 1]}", "f.yaml:1:22: train.betas[1]: found 1;"),
    "section as a task's option": ("task: {name: text, path: {a: 1}}",
     "task.path: found a section; allowed text, a number, true or false, or a list of these"),
    "list in a list": ("task: {states: [[1]]}", "task.states … found the list"),
    "eps that fp32 lacks": ("train: {eps: 1e-300}",
     "train.eps: found 1e-300; allowed a number from 1.2e-38 to 1"),
    "NaN": ("train: {lr: .nan}", "f.yaml:1:13: train.lr: found nan; allowed a number above 0"),
    "huge integer": ("seed: 1" + "0" * 60_000, "f.yaml:1:7: seed: found inf; allowed an integer"),
    "heads and width": ("model:\n  d_model: 66\n  n_heads: 4\n",
     "f.yaml:3:12: model.n_heads: found 4; allowed a divisor of model.d_model = 66"),
    "two lengths": ("train: {steps: 3, flops: 1e9}",
     "f.yaml:1:8: train: found steps and flops; allowed one of steps, tokens, flops"),
    "absurd memory": ("model:\n  d_model: 65536\n  depth: 1000\n",
     "f.yaml:2:12: model.d_model: found 65536, a run of … iB; allowed at most about … fits into"),
    "name with a slash": ("name: ../x", "name: found '../x'; allowed letters, digits, '.', '_'"),
    "long name": ("name: " + "x" * 65, "(at most 64)"),
    "tab": ("model:\n\tdepth: 6", "f.yaml:2:1: found a tab before the text; allowed spaces"),
    "no colon": ("model:\n  depth 6\nseed: 1\n", "f.yaml:2:3: model: found 'depth 6'"),
    "two colons": ("name: a: b", "f.yaml:1:8: found invalid YAML … in quotes if it holds ': '"),
    "open quote": ("seed: 1\nname: 'x", "f.yaml:2:7: found invalid YAML"),
    "anchor": ("model: &m {depth: 6}", "f.yaml:1:8: model: found the anchor '&m'"),
    "alias": ("seed: *s", "f.yaml:1:7: seed: found the alias '*s'"),
    "merge key": ("model:\n  <<: {depth: 6}", "f.yaml:2:3: model.<<: found the unknown key '<<'"),
    "tag": ("name: !!python/name:os.system x", "f.yaml:1:7: name: found the tag"),
    "two documents": ("seed: 1\n---\nseed: 2", "f.yaml:2:1: found a second document"),
    "directive": ("%YAML 1.1\n---\nseed: 1", "found a '%' directive"),
    "key that is a list": ("? [a]\n: 1", "f.yaml:1:3: found a list or section as a key"),
    "text alone": ("hello", "f.yaml:1:1: found 'hello'; allowed `key: value` lines"),
    "17 levels": ("{x: " * 17, "found more than 16 levels"),
    "not UTF-8": (b"seed: 1\nname: \xe4", "f.yaml:2:7: found the byte 0xe4, which is not UTF-8"),
    "escape code": (b"name: \x1b[31m", "f.yaml:1:7: found the control character '\\x1b'"),
    "escaped NUL": ('task: {path: "a\\0"}', "f.yaml:1:14: task.path: found the control character"),
    "65 KiB": (b"#" * (64 * 1024 + 1), "f.yaml: found … allowed a configuration of at most 64 KiB"),
    "study as a run": ("sweep:\n  grid: {seed: [0, 1]}",
     "f.yaml:1:1: sweep: this file describes a sweep; use: deepstack sweep f.yaml"),
}  # fmt: skip


AWKWARD = """
name: on
seed: 2147483647
model: {d_model: 12, n_heads: 3, scheme_options: {a: 1.0, b: 1, c: true, d: 'true'}}
task:
  name: markov
  texts: ['1e3', '~', 'null', "a'b", 'c"d', 'e\\f', ': ', '- x', '#', '', ' a ', "tab\\tend\\n"]
  more: [é, 😀, "\\u202e", '1_000', '.nan', 0.1, 1e300, -5e-324, 1e22, 123456789012, '0x1f']
  letters: "\\r\\u200b\\xa0"
  path: ../some file.txt
  nothing: null
train: {lr: 3e-4, betas: [0, 0.5], clip: null, trainable: [q, w1], lr_factors: {k: 0, head: 2.5}}
log: {layers_every: 10}
"""
GOOD = AWKWARD + "sweep: {grid: {model.depth: [6, 48], train.betas: [[0.9, 0.98], [0.9, 0.95]]}}\n"


HOSTILE: dict[str, str | bytes] = {
    "deep lists": "[" * 65_000,
    "deep sections": "{a: " * 16_000,
    "deep block keys": "? " * 30_000,
    "billion laughs": "a: &a [x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(99)),
    "many keys": "".join(f"k{i}:\n" for i in range(9000)),
    "many values": "task: {x: [" + "1," * 32_000 + "]}",
    "many options": "task: {" + "".join(f"o{i}: {{}}, " for i in range(6000)) + "}",
    "long key": "k" * 65_000 + ": 1",
    "long value": "name: " + "x" * 65_000,
    "long digits": "seed: " + "9" * 65_000,
    "long exponent": "train: {lr: 1e-" + "9" * 60_000 + "}",
    "many axes": "sweep:\n grid:\n" + "".join(f"  task.x{i}: [1]\n" for i in range(3000)),
    "names of the machinery": "model: {model_config: 1, __class__: 2}\n__init__: 4",
    "huge integers": f"seed: {2**63}\nmodel: {{depth: -{2**64}}}\ntrain: {{steps: {10**39}}}",
    "keys that are no words": "1: a\nnull: b\n[x]: c\n{y: z}: d\ntrue: e\n1.5: f\n~: g",
    "control characters": "".join(f"k{i}: '{chr(i)}'\n" for i in range(32)),
    "a byte order mark inside": b"seed: 1\n\xef\xbb\xbfmodel: {}",
    "64 KiB": b"seed: 1 #" + b"x" * (64 * 1024 - 9),
    "16 levels": "task: " + "{x: " * 15 + "1" + "}" * 15,
}
