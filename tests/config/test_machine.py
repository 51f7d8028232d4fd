"""Memory and cores within the limits of control groups, of both versions."""

from pathlib import Path

import pytest

from deepstack import config as conf
from deepstack.config import machine
from deepstack.training import choose_threads

MEBI = 2**20
NO_LIMIT = 9223372036854771712  # as version 1 writes it


def place(
    folder: Path, own: str, files: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a tree of control groups, and put this process into one."""
    for name, value in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (folder / "own").write_text(own)
    monkeypatch.setattr(machine, "MOUNT", folder / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", folder / "own")


SLURM = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
SCOPE = "12:cpu,cpuacct:/a/b\n9:memory:/a/b\n1:name=systemd:/a/b\n0::/\n"
CASES = {
    "the job of the step of a task (2)": (
        SLURM,
        {
            "system.slice/slurmstepd.scope/job_7/memory.max": 800 * MEBI,
            "system.slice/slurmstepd.scope/job_7/cpu.max": "100000 100000",
            "system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max",
            "system.slice/memory.max": 900 * MEBI,
            "cpu.max": "max 100000",
        },
    ),
    "a group below its limit (1)": (
        SCOPE,
        {
            "memory/a/memory.limit_in_bytes": 800 * MEBI,
            "memory/a/b/memory.limit_in_bytes": NO_LIMIT,
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": 150000,
            "cpu,cpuacct/a/b/cpu.cfs_period_us": 100000,
            "cpu,cpuacct/a/cpu.cfs_quota_us": -1,
            "cpu,cpuacct/a/cpu.cfs_period_us": 100000,
        },
    ),
    "a container whose path lies outside (1)": (
        "4:memory:/docker/abc\n3:cpu:/docker/abc\n",
        {
            "memory/memory.limit_in_bytes": 800 * MEBI,
            "cpu/cpu.cfs_quota_us": 50000,
            "cpu/cpu.cfs_period_us": 100000,
        },
    ),
    "a container with its own names (2)": (
        "0::/../x\n",
        {"memory.max": 800 * MEBI, "cpu.max": "50000 100000"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_limit_of_all_groups_above_counts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, *CASES[case], monkeypatch)
    assert conf.machine_memory() == 800 * MEBI
    assert conf.available_memory() <= 800 * MEBI
    assert conf.cores() == 1
    wide = conf.parse_config("{model: {d_model: 512, depth: 2}, train: {batch_size: 64}}")
    assert choose_threads(wide) == 1


def test_without_a_limit_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    place(tmp_path, SLURM, {"memory.max": "max", "cpu.max": "max 100000"}, monkeypatch)
    everything = conf.machine_memory(), conf.cores()
    assert everything[0] > 2**28 and everything[1] == 6
    for own in ("", "nonsense\n0\n", SCOPE):
        place(tmp_path, own, {"cpu.max": "1x 0"}, monkeypatch)
        assert (conf.machine_memory(), conf.cores()) == everything
    place(tmp_path, SLURM, {"cpu.max": "350000 100000"}, monkeypatch)
    assert conf.cores() == 3


def test_memory_used_in_a_limited_group_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"memory.max": 64 * MEBI, "memory.current": 40 * MEBI}
    place(tmp_path, "0::/\n", used, monkeypatch)
    assert conf.available_memory() == 24 * MEBI
    files = f"anon {30 * MEBI}\nfile {10 * MEBI}\ninactive_file {8 * MEBI}"
    place(tmp_path, "0::/\n", used | {"memory.stat": files}, monkeypatch)
    assert conf.available_memory() == 32 * MEBI
