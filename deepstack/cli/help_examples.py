"""The example that each command's help shows."""

EXAMPLES = {
    "train": "deepstack train quick model.scheme=post_ln",
    "sweep": "deepstack sweep --depths 6,48 --seeds 0,1,2",
    "calibrate": "deepstack calibrate quick --depths 6,12,24",
    "plot": "deepstack plot metric results/quick --x depth --y val_loss --by scheme",
    "report": "deepstack report results/",
    "compare": "deepstack compare results/depth_sweep --against post_ln",
    "ls": "deepstack ls results/depth_sweep",
    "watch": "deepstack watch results/",
    "serve": "deepstack serve results/",
    "check": "deepstack check quick model.depth=1000",
    "init": "deepstack init mine.yaml --from quick",
    "list": "deepstack list schemes",
    "theory": "deepstack theory --claim C9",
    "bench": "deepstack bench small --peers torch",
    "export": "deepstack export results/quick/RUN --to model.safetensors",
    "verify": "deepstack verify results/",
    "rerun": "deepstack rerun results/quick/RUN --check",
    "rm": "deepstack rm results/quick",
    "tag": "deepstack tag results/quick/RUN good",
    "note": 'deepstack note results/quick/RUN "loss falls late"',
}
