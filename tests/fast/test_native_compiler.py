"""The kernels are compiled once and loaded only from a folder that is this user's alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.small_runs import small

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.cli.check_command import facts_of
from deepstack.fast.native import Kernels, compiler, find_kernels


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """A cache folder of this test, in which the kernels of another one count as compiled."""
    found = find_kernels(print)
    if isinstance(found, str):
        pytest.skip(found)
    [compiled] = compiler.cache_folder().glob(f"kernels-{found.description[-16:]}.so")

    def copy(path: str, library: Path) -> None:
        library.unlink(missing_ok=True)  # this process may have loaded it
        shutil.copy(compiled, library)
        compiler.checksum_of(library).write_text(compiler.sha256(library))

    calls = Mock(side_effect=copy)
    monkeypatch.setattr(compiler, "compile_kernels", calls)
    monkeypatch.setattr(compiler, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield calls


def fresh() -> Kernels | str:
    """Find the kernels as another process would."""
    compiler._found.clear()
    return find_kernels(lambda line: None)


def test_kernels_are_compiled_once_into_a_private_folder(compilations: Mock) -> None:
    first, second = fresh(), fresh()
    assert isinstance(first, Kernels) and isinstance(second, Kernels)
    assert compilations.call_count == 1
    assert compiler.cache_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["shorter", "replaced", "writable", "no checksum"])
def test_a_damaged_library_is_compiled_again(damage: str, compilations: Mock) -> None:
    fresh()
    [library] = compiler.cache_folder().glob("*.so")
    content = library.read_bytes()
    if damage in ("shorter", "replaced"):
        library.unlink()  # this process has loaded it
        library.write_bytes(content[:1000] if damage == "shorter" else b"\x7fELF" + bytes(5000))
    elif damage == "writable":
        library.chmod(0o777)
    else:
        compiler.checksum_of(library).unlink()
    assert isinstance(fresh(), Kernels) and compilations.call_count == 2


def test_a_folder_that_others_may_write_to_is_refused(compilations: Mock) -> None:
    compiler.cache_folder().mkdir(parents=True)
    compiler.cache_folder().chmod(0o777)
    reason = fresh()
    assert isinstance(reason, str) and "must be a folder that belongs to this user" in reason
    assert "chmod 700" in reason and not compilations.call_count


def test_a_link_in_place_of_the_folder_is_refused(compilations: Mock, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    compiler.cache_folder().parent.mkdir()
    compiler.cache_folder().symlink_to(tmp_path / "elsewhere")
    assert "must be a folder" in str(fresh()) and not compilations.call_count


def test_without_a_compiler_torch_replays_the_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(compiler, "_found", {})
    compiler.find_compiler.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = small(train__steps=3, runtime__replay=True)
    reason = "found no C++ compiler (no-such-compiler)"
    assert facts_of(given)["replay"] == f"steps are replayed by torch's kernels: {reason}"
    run = deepstack.train(given, out=tmp_path)
    assert run.meta["environment"]["replayed"] and "executor" not in run.meta["environment"]
    assert reason in (run.path / "log.txt").read_text()
    with pytest.raises(ConfigError, match=r"runtime.replay: found native, but found no C\+\+"):
        deepstack.train(small(runtime__replay="native"), out=tmp_path / "native")


def test_a_compiler_that_fails_leaves_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bin" / "c++"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: no space left' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    monkeypatch.setattr(compiler, "_found", {})
    compiler.find_compiler.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notices: list[str] = []
    reason = find_kernels(notices.append)
    assert reason == f"{fake} does not compile the kernels: error: no space left"
    assert len(notices) == 1 and not list(compiler.cache_folder().glob("*.so"))


@pytest.fixture(autouse=True)
def real_compiler_afterwards() -> Iterator[None]:
    """Forget the compiler that a test has found."""
    yield
    compiler.find_compiler.cache_clear()


@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = "from deepstack.fast.native import find_kernels; print(find_kernels(print))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate()[0] for process in started]
    assert sum("compiling the kernels" in answer for answer in answers) == 1
    assert all("Kernels(" in answer for answer in answers)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the checks of addresses")
def test_kernels_read_and_write_within_their_operands(tmp_path: Path) -> None:
    """Run the tests of single kernels with checks of addresses and of undefined behaviour."""
    compiler_path, _ = compiler.find_compiler()
    libraries = [
        subprocess.check_output([compiler_path, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler has no checks of addresses")
    script = (
        "import sys, pytest\n"
        "from deepstack.fast.native import compiler\n"
        "compiler.FLAGS += ('-g', '-fsanitize=address,undefined', '-fno-sanitize-recover=all')\n"
        "names = 'kernel_gives or special_values'\n"
        "file = 'tests/fast/test_native.py'\n"
        "sys.exit(pytest.main(['-qs', '-n', '0', '-p', 'no:cacheprovider', '-k', names, file]))\n"
    )
    checked = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
    }
    environment = os.environ | checked | {"XDG_CACHE_HOME": str(tmp_path)}
    folder = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert "33 passed" in answer.stdout
