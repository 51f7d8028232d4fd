"""Mistakes in plugins: a line each, with file and line; and the plugins of docs/plugins.md work."""

import json
import re
from pathlib import Path
from textwrap import dedent, indent

import numpy as np
import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY, succeed, typed
from helpers.extensions import needs
from helpers.plugin_texts import FIRST, RESIDUAL, said
from helpers.sampling import some

import deepstack
from deepstack.base.errors import PluginError
from deepstack.base.plugins import load_plugins
from deepstack.records import Run, RunFolder

POST_LN = RESIDUAL + "return norm(x + G(x))\n"
GAIN = POST_LN + "@classmethod\ndef gain(cls, role, layer, depth):\n    "
OPTIM = POST_LN + "@classmethod\ndef optim(cls, role, depth):\n    "
INIT = (
    POST_LN
    + "def __init__(self, layer, depth, parts):\n    super().__init__(layer, depth, parts)\n    "
)
SLOT = INIT + "self.slots['{}'] = torch.nn.Dropout({})"
ONES = "self.scale = parameter({}, role='scheme', start='one')"

# body of the class -> message; lines count from the top of the file
SCHEMES = [
    (RESIDUAL + "return norm(x + G(x)).double()", "of torch.float64 for x"),
    (RESIDUAL + "return norm(x + G(x)), x", "gave tuple .* in its own `layer`"),
    (
        RESIDUAL + "return norm(x + G(x)), x\n" + "def layer(self, x, a, f):\n"
        "    return self.residual(x, f, self.feed_forward_norms[0])[0]",
        "gave tuple .* in its own `layer`",
    ),
    (RESIDUAL + "norm(x + G(x))", "residual gave None, as without `return`"),
    (POST_LN + "def enter(self, x):\n    return {'x': x}", r"own.py:10: enter gave dict"),
    (RESIDUAL + "x += G(x)\n    return norm(x)", "residual changes x in place"),
    (RESIDUAL + "return norm(x + torhc.tanh(G(x)))", "own.py:9, in .*: NameError"),
    ("merges = False", "defines neither residual nor layer; write residual"),
    (
        "def residual(self, x, norm, G):\n    return norm(x + G(x))",
        r"line 8: found residual\(self, x, norm, G\); allowed residual\(self, x, G, norm\): th",
    ),
    ("def __init__(self, d_model):\n    pass", r"allowed __init__\(self, layer, dep"),
    (
        "def __init__(self, layer, depth, parts):\n    self.a = 2.0",
        r"own.py:8: its __init__ does not call super\(\).__init__\(layer, depth, parts\)",
    ),
    (
        "families = 'decoder', 'encoder_decoder'\ndef layer(self, x, attention, feed_forward):\n"
        "    return x",
        r"line 9: .* allowed layer\(self, x, attention, cross_attention, feed_forward\)",
    ),
    ("def resdiual(self, x, G, norm):\n    return x", "did you mean residual"),
    (POST_LN + "final_norms = True", "has no final_norms; did you mean final_norm"),
    ("families = 'encodr',", r"families is \('encodr',\); allowed: some of enc"),
    ("families = 'encoder', ['x']", r"families is \('encoder', \['x'\]\); allowed: some of enc"),
    (POST_LN + "families = 3", "own.py:5: .*families is 3; allowed: some of enc"),
    (POST_LN + "norms_per_sublayer = '2'", "own.py:5: .*sublayer is '2'; allowed a whole number"),
    (POST_LN + "stream_norms = -1", "stream_norms is -1; allowed a whole number from 0 on"),
    (POST_LN + "stream_norms = 2", "own.py:8: the stream is one tensor; allowed a tuple of 2, re"),
    (POST_LN + "stream_norms = 1", "own.py:8: the stream is one tensor; allowed a tuple of 1, re"),
    (
        "stream_norms = 2\ndef enter(self, x):\n    return x, x, x\n"
        "def layer(self, x, a, f):\n    return x",
        "own.py:11: the stream is a tuple of 3; allowed a tuple of 2, re",
    ),
    (POST_LN + "final_norm = 'no'", "final_norm is 'no'; allowed True or False"),
    (
        POST_LN + "def gain(self, role, layer, depth):\n    return 1.0",
        r"line 10: gain takes self; .* @classmethod def gain\(cls, role, layer, dep",
    ),
    (POST_LN + "alpha = 2.0", r"alpha is 2.0; .* def alpha\(cls, depth\)"),
    (GAIN + "return float('nan')", r"own.py:10: gain\('embedding', 0, 2\) gave nan"),
    (GAIN + "return 1 / layer", "own.py:12, in .*: ZeroDivisionError: division by zero"),
    (OPTIM + "return 0.5", r"gave 0.5; allowed deepstack.schemes.Optim\(lr="),
    (
        "def residual(self, x, G, norm, *, s):\n    return norm(x + s * G(x))",
        "own.py:8: residual has the argument s, which no sublayer has",
    ),
    (
        POST_LN + "def __init__(self, layer, depth, parts, *, a: float):\n    pass",
        "own: option 'a' needs a type annotation and a default",
    ),
    (SLOT.format("after_activations", 0.0), "unknown slot 'after_activations'; did you mean"),
    (SLOT.format("before_cross_out", 0.0), "unknown slot 'before_cross_out'"),
    (SLOT.format("after_activation", 0.5), "model.dropout: found 0, .* slots.after_act"),
    (INIT + ONES.format("layer"), r"layer 2 has the parameter scale \(2,\), layer 1 .* \(1,\)"),
    (INIT + f"if layer == 2:\n        {ONES.format(1)}", r"\(1,\), layer 1 no parameter scale"),
    (
        INIT + "self.scale = parameter(3, role='scheem', start='one')",
        r"own.py:12: parameter\(3,\): unknown role 'scheem'; did you mean 'scheme'\?",
    ),
    (INIT + "self.map = torch.nn.Linear(8, 3)", r"map.weight is torch's.*s.parameter\(3, 8, role="),
    (
        "shared = parameter(1, role='scheme', start='one')\n" + INIT + "self.scale = self.shared",
        "scale of layer 2 is the same parameter as scale of layer 1",
    ),
    (
        INIT + ONES.format(1) + "\n    self.b = self.scale",
        "b of layer 1 is the same parameter as scale of layer 1",
    ),
    (INIT + "self.g = torch.ones(3)", r"g is a tensor of its own, .*parameter\(3, role"),
    (INIT + "self.g = torch.tensor(1.0)", r"g is a tensor of its own, .*parameter\(1, role"),
    (INIT + "self.layer = layer", "sets self.layer, .* such as self.own_layer"),
    (INIT + "self.enter = torch.nn.ReLU()", "sets self.enter, .* such as self.own_enter"),
    (
        POST_LN + "@classmethod\ndef head_factor(cls):\n    return float('nan')",
        r"own.py:10: head_factor\(\) gave nan; allowed a finite number >= 0",
    ),
    *(
        (f"{POST_LN}@classmethod\ndef {method}:\n    {body}", rf"own.py:10: {wanted}")
        for method, body, wanted in (
            ("extra_memory(cls, sizes)", "pass", r"extra_memory\(StackSizes\(.*gave None; all"),
            ("extra_flops(cls, sizes)", "return '3'", "extra_flops.*gave '3'; allowed a finite"),
            ("alpha(cls, depth)", "return '3'", r"alpha\(2\) gave '3'; allowed .* or None"),
            ("beta(cls, depth)", "return float('inf')", r"beta\(2\) gave inf; allowed a finite"),
        )
    ),
    (RESIDUAL + "return norm(x + torch.rand(()) * G(x))", "draws random numbers in eval"),
]


FILES = [
    (
        "from deepstack.schemes import Scheme\nclass Own(Scheme):\n    '''x'''",
        "own.py:2: the scheme Own: its first line lacks name, label or paper",
    ),
    (FIRST.replace('"own"', '"my-own"'), "the scheme name 'my-own': allowed a word of let"),
    (FIRST.replace('"own"', '"deepnorm"'), "'deepnorm' is already taken by deepstack."),
    (
        "from deepstack import Scheme",
        "own.py:1: ImportError: .* a plugin is one file; .* names of deepstack.schemes, .tasks",
    ),
    ("import sys\nsys.exit(3)", "own.py:2: it ends Python, with 3; put what is to be"),
    (
        "import deepstack\nconfig = deepstack.load_config('quick.yaml')\ndeepstack.train(config)",
        "own.py:3: it calls deepstack.train while it is loaded",
    ),
    (
        "from deepstack.tasks import task\n@task\ndef own(*, seq_len: int, seed: int):\n"
        "    '''Own.'''",
        r"own.py:2: @task stands without a name; write @task\('own'\)",
    ),
]


TASK = '''
import numpy as np
from deepstack.tasks import Batch, Task, task

@task("own")
def own(*, seq_len: int, seed: int):
    """Own."""
    def draw(random, batch_size, held_out):
        x = random.integers(0, 5, (batch_size, seq_len))
        there = np.ones_like(x, bool)
        {}
    return Task("own", 5, seed, draw)
'''
TASKS = [
    (
        TASK.format("x = np.random.randint(0, 5, x.shape); return Batch(x, x, there)"),
        "draw gave two batches for one state of its generator; draw from `random`",
    ),
    (TASK.format("return Batch(x, y, there)"), "own.py:11, in own.*draw: NameError: name 'y'"),
    (TASK.replace(", held_out", "").format("pass"), r"a function draw\(random, batch_size, h"),
    (TASK.replace('"own", 5', '"own", 5.0').format("pass"), "vocab_size=5.0; allowed"),
    (TASK.replace("seed, draw)", "draw, seed)").format("pass"), r"not a callable .* Task\(name"),
]


MISTAKES = [
    *((f"{FIRST}\n{indent(body, '    ')}", "model.scheme=own", wanted) for body, wanted in SCHEMES),
    *((text, "seed=0", wanted) for text, wanted in FILES),
    *((text, "task.name=own", wanted) for text, wanted in TASKS),
]


@pytest.mark.parametrize(
    ("text", "word", "wanted"), MISTAKES, ids=[wanted for _, _, wanted in MISTAKES]
)
def test_a_file_with_a_mistake(
    text: str, word: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(QUICK).parent)
    found = said(tmp_path / "own.py", text, word)
    assert re.search(wanted, found.strip()), found
    assert not list(tmp_path.rglob("status.json")) and not Path("results").exists()


def test_a_diagnostic_that_changes_what_others_read_or_fails(tmp_path: Path) -> None:
    text = dedent('''
        from deepstack.diagnostics import diagnostic

        @diagnostic("own", "k", parts=())
        def own(snapshot):
            """Own."""
            return snapshot.{}
    ''')
    found = said(tmp_path / "own.py", text.format("grad_norm.mul_(100)"))
    assert "own.py:4: it changes the snapshot in place" in found
    found = said(tmp_path / "other.py", text.format("gradients").replace('"own"', '"other"'))
    assert "other.py:7, in own: AttributeError: 'Snapshot' object has no attribute" in found
    (run,) = (tmp_path / "r" / "quick").iterdir()
    assert found.endswith(f"(the traceback: {run / 'log.txt'})\n")
    status = RunFolder(run).read_status()
    assert status["state"] == "failed" and "other.py:7, in own: " in status["error"]


@pytest.mark.parametrize("good", [0, 2])
def test_a_diagnostic_that_goes_wrong_later_fails_the_run(tmp_path: Path, good: int) -> None:
    """Exit code 2 says that nothing was run: so at the first look, and not after steps."""
    text = dedent(f'''
        from deepstack.diagnostics import diagnostic

        looks = []

        @diagnostic("late", "k", parts=())
        def late(snapshot):
            """Late."""
            looks.append(snapshot)
            return snapshot.grad_norm if len(looks) <= {good} else snapshot.grad_norm.mean()
    ''')
    (file := tmp_path / f"late{good}.py").write_text(text)
    words = ("train.steps=3", "log.layers_every=1", "--plugin", file, "-q", "--out", tmp_path / "r")
    result = typed("train", QUICK, *TINY, *words)
    assert result.exit_code == (1 if good else 2) and "found () for late" in result.stderr
    (run,) = (tmp_path / "r" / "quick").iterdir()
    status = RunFolder(run).read_status()
    assert (status["state"], status["step"]) == (("failed", good) if good else ("running", 0))


@pytest.mark.parametrize(
    ("body", "fused", "state"),
    [
        (RESIDUAL + "return norm(x + G(x) / 0 * 0)\n", "auto", "diverged"),
        ("def layer(self, x, a, f):\n    return f(x + a(x)) + x * bool(a.SLOTS)", "false", "done"),
        (GAIN + "return 1 / math.log(depth)", "auto", "done"),
    ],
    ids=["not finite at the start", "more of a sublayer than its output", "no sense at depth 1"],
)
def test_an_unusual_scheme_is_trained(body: str, fused: str, state: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import math\n" + FIRST + indent(body, "    "))
    load_plugins([tmp_path / "own.py"])
    config = deepstack.load_config(QUICK, [*TINY, "model.scheme=own", f"runtime.fused={fused}"])
    assert deepstack.train(config, out=tmp_path).state == state


def test_a_plugin_that_is_mended_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(FIRST + "\nraise RuntimeError('not yet')\n")
    with pytest.raises(PluginError, match=r"own\.py:8: RuntimeError: not yet"):
        load_plugins([str(file)])  # a path may be text
    file.write_text(FIRST)
    load_plugins([file])
    assert "own" in deepstack.schemes.SCHEMES


def test_output_of_a_plugin_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('hello')\n")
    result = typed("check", QUICK, "--json", "--plugin", tmp_path / "loud.py")
    assert result.exit_code == 0 and "hello" not in result.stdout and "hello" in result.stderr


# --- docs/plugins.md: every block works, from the command line and from Python --------------------


PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
TOKENS, MINE, MEMORY, BOUNDED, PARITY, SEEN, OBSERVER = re.findall(
    r"```python\n(.*?)```", PAGE, re.DOTALL
)
BLOCKS = {
    "model.scheme=mine": MINE, "model.scheme=memory": MEMORY, "model.scheme=bounded": BOUNDED,
    "task.name=parity": PARITY,
}  # fmt: skip


def test_the_task_reads_its_own_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "my.npy", np.arange(500) % 7)
    file = tmp_path / "my_task.py"
    file.write_text(TOKENS)
    words = [QUICK, *TINY, "model.family=decoder", "task.name=my_tokens"]
    words += [f"task.path={tmp_path / 'my.npy'}", "--plugin", file, "-q", "--out", tmp_path]
    run = Run(succeed("train", *words))
    assert run.meta["data"]["name"] == "my.npy"
    task = deepstack.tasks.task_of(deepstack.load_config(run.path / "config.yaml"))
    batch = task.train_batch(1, 50)
    assert ((batch.inputs + 1) % 7 == batch.targets).all() and batch.inputs.max() == 6
    np.save(tmp_path / "my.npy", np.arange(500) % 5)
    assert succeed("train", *words) == f"{run.path}-2"  # other data: another run


@needs("export")
@pytest.mark.parametrize("word", some(BLOCKS, 2))
def test_a_block_is_trained_made_again_and_exported(word: str, tmp_path: Path) -> None:
    file = tmp_path / f"{word.partition('=')[2]}_file.py"
    file.write_text(BLOCKS[word])
    words = QUICK, *TINY, word, "--plugin", file
    succeed("check", *words)
    run = succeed("train", *words, "-q", "--out", tmp_path)
    succeed("verify", run)
    succeed("plot", "loss_vs_step", run, "--format", "csv")
    succeed("rerun", run, "--check", "--plugin", file)
    succeed("export", run, "--to", tmp_path / "x", "--plugin", file)


def test_the_scheme_s_numbers_are_what_the_page_says(tmp_path: Path) -> None:
    file = tmp_path / "numbers.py"
    file.write_text(MINE.replace("add_per_sublayer", "of_each"))  # its earlier name
    rows = json.loads(succeed("list", "schemes", "--plugin", file, "--depth", 4, "--json"))
    (row,) = (row for row in rows if row["name"] == "mine")
    assert row["gains"]["v"] == 0.5 and row["equation"].startswith("x <- LN(x + g * G(x))")
    options = ["model.scheme=mine", "model.scheme_options.start=0.25"]
    facts = json.loads(succeed("check", QUICK, *TINY, *options, "--json"))[0]
    assert facts["parameters scheme"] == 2 * 2 * 8
    config = deepstack.load_config(QUICK, [*TINY, *options])
    scheme = deepstack.build_model(config, vocab_size=5).model.schemes[0]
    assert [g.tolist() for g in scheme.each("g")] == [[0.25] * 8] * 2
    assert type(scheme).optim("scheme", 4).lr == 0.1


def test_the_diagnostic_and_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "seen.py"
    file.write_text(SEEN)
    load_plugins([file])
    run = deepstack.train(deepstack.load_config(QUICK, TINY), out=tmp_path)
    found = np.load(run.path / "layers" / "stream_kurtosis.npy")
    assert found.shape[1] == 2 and (found > 1).all()
    succeed("plot", "last_loss", run.path, "--format", "csv")


def test_the_observer_hears_every_run(tmp_path: Path) -> None:
    file = tmp_path / "events.py"
    file.write_text(OBSERVER)
    words = QUICK, *TINY, "--plugin", file, "-q", "--out", tmp_path
    events = Path(succeed("train", *words)).with_suffix(".events").read_text().splitlines()
    assert [json.loads(line)["step"] for line in events] == [0, 2]
    # A mistake ends the run with the line of the file.
    broken = tmp_path / "broken.py"
    broken.write_text(OBSERVER.replace("events_file", "broken").replace('"loss"]', '"lsos"]'))
    failed = typed("train", *words, "seed=1", "--plugin", broken)
    assert failed.exit_code == 1 and "broken.py:" in failed.stderr and "lsos" in failed.stderr
