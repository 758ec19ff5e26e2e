"""What commands refuse: exit status 2, and one line on stderr that names option, value and cure."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from horovod_topk import cli, reporting

pytestmark = pytest.mark.tools

# Command line => a part of the error. `plan`, `bench` and `compare` get what they need besides.
REFUSED = """
bytes --local-size 0 => --local-size 0: give 1 or more ranks a node
bytes --local-size 129 => --local-size 129: give 128 ranks a node at most
bytes --ranks 1 => --ranks 1: give 2 or more; one rank exchanges nothing
bytes --ranks 0 => --ranks 0: give 2 or more
bytes --ranks 1000000000 => --ranks 1000000000: give 16,384 at most
bytes --ranks 99999999999999999999999999999999999999999 => 99999999999999999999... (41 digits)
bytes --model absent/no.json => --model absent/no.json: there is no such file. Give the path of a
bytes --model resnet51 => --model resnet51: no model of that name is known. Give one of resnet18
bytes --model / => --model /: that is a folder. Name a JSON file of shapes in it
bytes --ratio 3 => ratio=3
bytes --ratio nan => ratio=nan lies outside (0, 1]
bytes --ratio inf => ratio=inf
bytes --gather-ratio 0 => lies outside (0, 1]
bytes --min-numel -1 => min_numel=-1
bytes --ratios *=nan => nan
bytes --ratios head => --ratios head: write PATTERN=RATIO, as in 'head.*=dense' or '*=0.1'
bytes --ratios =0.5 => --ratios =0.5: write PATTERN=RATIO
plan --ratios 0=half => --ratios 0=half: write PATTERN=RATIO
plan --ratios 0=2 => ratio['0']=2.0 lies outside (0, 1]
plan --ratios fc=0.5 => ratio: the pattern 'fc' matches none of 161 tensors
bytes --compressor Zip => there is no compressor 'Zip'
bytes --compressor QSGD(bits=1) => bits=1
bytes --compressor none => --compressor none: the table has it, as allreduce
plan --compressor Zip => there is no compressor 'Zip'
plan --ranks 1 => --ranks 1: give 2 or more; one rank exchanges nothing
plan --ranks two => --ranks 'two' is not a whole number such as 8
plan --ratio x => --ratio 'x' is not a number such as 0.01
plan --ratio -x => argument --ratio: expected one argument. `horovod-topk plan --help` lists
plan --compute => argument --compute: expected one argument
plan --powersgd 0 => --powersgd 0: give 1 or more
plan --powersgd 65537 => --powersgd 65537: give 65,536 at most
plan --crowd 0 --cores 2 => --crowd 0: give 1 or more
plan --crowd 99999 --cores 2 => --crowd 99999: give 16,384 at most
plan --crowd 4 => --crowd 4: give --cores too, the cores that they share
plan --forward nan => --forward nan: give a share from 0 to 1
plan --forward 2 => --forward 2: give a share from 0 to 1
plan --forward -.5 => --forward -0.5: give a share from 0 to 1
plan --cores nan => --cores nan: give a number from 0.01
plan --cores inf => --cores inf: give a number from 0.01
plan --cores 1e-300 => --cores 1e-300: give a number from 0.01
plan --cores 0 => --cores 0: give a number from 0.01
plan --compute 9999999999s => give 1,000,000 s at most
plan --compute -5ms => --compute '-5ms' is not a time: give a number of 0 or more with
plan --compute 0ms => --compute 0ms: give a time above 0, such as 62.5ms
plan --latency 1000001s => --latency '1000001s' is too long: give 1,000,000 s at most
plan --latency 5 => --latency '5' is not a time: give a number of 0 or more with its
plan --bandwidth 1001tbit => '1001tbit' is too fast: give 1,000 Tbit/s at most
plan --bandwidth 0.1bit => --bandwidth '0.1bit' is too slow: give 1bit (a second) or more
plan --bandwidth fast => --bandwidth 'fast' is not a bandwidth: give a number above 0
plan --bandwidth -1gbit => --bandwidth '-1gbit' is not a bandwidth: give a number above
plan --local-bandwidth 99999999999999999999bit => give 1,000 Tbit/s at most
plan --momentum --optimizer adam => TopKEF does one of the two; give one
plan --values sign => --values sign: the verdict never recommends it
plan --model no.json => --model no.json: there is no such file. Give the path of a
plan --machine no.json => --machine no.json: there is no such file. `horovodrun -np 2
plan --machine train.py => --machine train.py has no machine's constants
plan --measure --machine /absent/y.json => --machine /absent/y.json: there is no folder /absent
plan --measure => --measure needs ranks: run `horovodrun -np 2 horovod-topk plan
plan --picture absent/plan.png => --picture absent/plan.png: there is no folder absent
plan --picture plan.foo => --picture plan.foo: end its name in one of
plan --picture plan => --picture plan: end its name in one of
bench --rounds 0 => --rounds 0: give 1 or more
bench --rounds 100001 => --rounds 100001: give 100,000 at most
bench --idle-parameters -1 => --idle-parameters -1: give 0 or more
bench --idle-parameters 10001 => --idle-parameters 10001: give 10,000 at most
bench --idle-parameters 1 --methods powersgd => 1 with powersgd: torch's ranks
bench --compute gpu:1 => --compute 'gpu:1': write sleep:0.2 or cpu:0.2
bench --compute sleep:-1 => --compute 'sleep:-1': write sleep:0.2 or cpu:0.2
bench --compute sleep:nan => --compute 'sleep:nan': write sleep:0.2
bench --rate fast => --rate 'fast' is not a bandwidth: give a number above 0
bench --rate 0bit => --rate '0bit' is not a bandwidth
bench --beside no.json => --beside no.json: no such file
bench --model no.json => --model no.json: there is no such file
bench --script no.py => --script no.py: no such file
bench --script train.py --idle-parameters 1 => leave out --compute and --idle
bench --script train.py --optimizer sgd => leave out --optimizer
bench --script train.py --methods ddp => ddp is no compression of hvd.
bench -- --epochs 3 => --epochs 3: arguments of what? Give --script as well
bench --json /absent/x.json => --json /absent/x.json: there is no folder /absent
bench --json /tmp => --json /tmp: that is a folder. Name a file in it
bench --picture /absent/x.png => --picture /absent/x.png: there is no folder /absent
bench => no launcher started this process, so there are no ranks: run it as `horovodrun -np 2
compare missing.py => no such script
compare train.py --no-runs => no runs of these settings
compare train.py --compressors Top => no compressor 'Top'
compare train.py --ranks 1 => exchanges nothing
compare train.py --ranks 0 => 0 rank exchanges nothing
compare train.py --ranks 16385 => give 16,384 at most
compare train.py --limit -5 => --limit -5: give a number above
compare train.py --limit nan => --limit nan: give a number
compare train.py --limit 0 => --limit 0: give a number above
compare train.py --budget inf => --budget inf: give a number
compare train.py --target nan => --target nan: give a finite
compare train.py --jobs 0 => --jobs 0: give 1 or more
compare train.py --seeds 0 => seeds (): give one or more
compare train.py --seeds -1 => seeds (): give one or more
compare train.py --seeds 99999 => 99999: give 1,000 at most
compare train.py --network x => --network 'x' is not a band
compare train.py --hosts '' => --hosts '': name one, or leave
compare train.py --picture x.xyz => --picture
cure => invalid choice: 'cure' (choose from 'doctor'
"""
NEEDED = {"compare": ("scipy", "tqdm"), "bench": ("torch",), "--picture": ("matplotlib",)}
SHAPES = {  # what a file says -> a part of the error
    "[1, 2]": 'it is not a JSON object such as {"weight": [3, 4]}',
    "{": 'it is not a JSON object such as {"weight": [3, 4]}',
    "\N{SNOWMAN}": "it is not a JSON object",  # in a charset of its own
    "[" * 100_000: "it is not a JSON object",
    f'{{"a": [1{"0" * 5000}]}}': "it is not a JSON object",
    "{}": "it has no elements. Give at least one non-empty shape",
    '{"a": [3, 0]}': "it has no elements. Give at least one non-empty shape",
    '{"a": [Infinity]}': "'a' has the shape [Infinity]. Give whole numbers of 0 or",
    '{"a": [-3, 4], "b": [5]}': "'a' has the shape [-3, 4]",
    '{"a": [3.7, 2]}': "'a' has the shape [3.7, 2]",
    '{"a": "34"}': "'a' has the shape \"34\"",
    '{"a": [true, 3]}': "'a' has the shape [true, 3]",
    '{"a": 3}': "'a' has the shape 3",
}


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    found = capsys.readouterr()
    assert message in found.err and found.err.count("\n") == 1 and not found.out


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_is_refused(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in reporting.RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import horovod_topk")
    written, _, message = line.partition(" => ")
    words = shlex.split(written)
    for module in [each for word in words for each in NEEDED.get(word, ())]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module} is installed")
    if words[0] == "plan" and "--compute" not in words:
        words += ["--compute", "1s"]
    refused(words, message, capsys)


@pytest.mark.parametrize("text", SHAPES, ids=lambda text: text[:20])
def test_a_file_that_has_no_shapes(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bytes`, `plan` and `bench` read it by one function."""
    path = tmp_path / "shapes.json"
    path.write_bytes(text.encode("utf-16" if text == "\N{SNOWMAN}" else "utf-8"))
    commands = [["bytes"], ["plan", "--compute", "1s"], ["bench"]]
    for command in commands if text == "{}" else commands[:1]:
        refused([*command, "--model", str(path)], f"--model {path}: {SHAPES[text]}", capsys)
