"""The report of made run folders: the page holds together by itself, the text, what is no run folder."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.unit.telemetry.test_goodput import TWO_KILLS, record
from tfdist.control.amounts_text import long_time, with_prefix
from tfdist.control.exit_codes import ConfigError
from tfdist.report import main, read_runs
from tfdist.storage.reader_copy import ReadRun
from tfdist.telemetry.report_plots import memory
from tfdist.telemetry.run_log import RunLog, quantile

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page; fails where an element is not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.captions, self.text, self.links, self.ids = [], [], [], [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.links += [
            value
            for name, value in attributes
            if name in ("href", "src", "xlink:href", "srcset") or tag in ("script", "link", "iframe")
        ]
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and "svg" not in self.open and self.open[-1] != "style":
            self.text.append(data)
        if self.open and self.open[-1] in ("h2", "figcaption"):
            (self.headings if self.open[-1] == "h2" else self.captions).append(data)


def write_run(folder, history, flags="", ranks=1):
    (folder / "logs").mkdir(parents=True)
    (folder / "flags.txt").write_text(
        f"# Written by tfdist\n--source=text\n--sequence_length=128\n--noshuffle\n{flags}\n"
    )
    for rank in range(ranks):
        (folder / "logs" / f"rank-{rank}.jsonl").write_text(
            "".join(json.dumps({**record(*event), "rank": rank}) + "\n" for event in history)
        )
    return folder


def full_history():
    """A run that logs all that a report can show."""
    history = [
        (
            10,
            0,
            "start",
            0,
            {
                "startup_s": 10.0,
                "message": "4 workers <b>& more</b>",
                "workers": 2,
                "parameters": 1234567,
                "config_digest": "d",
            },
        )
    ]
    for step in range(1, 1500):
        values = {
            "train/loss": 3 / step,
            "train/learning_rate": 1e-3,
            "train/gradient_norm": 1 / step,
            "train/loss_scale": 2.0 ** (step // 500),
            "perf/steps_per_s": 1 + step % 3,
            "perf/samples_per_s": 64.0,
            "perf/model_flops_per_s": 5e12,
            "perf/mfu": 0.41,
            "perf/compute_s": 0.1,
            "perf/slowest_compute_s": 0.2,
            "perf/slowest_rank": step % 2,
            "memory/host_bytes": 2e9,
            "train/accuracy": 0.5,
        }
        history += [
            (10 + step, 0, "train", step, values),
            (
                10 + step,
                0,
                "phases",
                step,
                {
                    "phase/data_wait_s": 0.25,
                    "phase/backward_s": 0.5,
                    "phase/gradient_sync_s": 0.125 * (step % 2),
                    "overlap/gradient_sync_s": 0.25,
                    "phase_steps": 1 + step % 2,
                },
            ),
        ]
    return [
        *history,
        (1590, 0, "verdict", 1499, {"message": "input-bound: 28 % of the time waiting for data.", "final": True}),
        (1600, 0, "save", 1499, {"save/step": 1499, "save/bytes": 12345678, "save/write_s": 2.0}),
        (1610, 0, "end", 1499, {"stopped": False}),
    ]


def runs_phases(folder):
    """Of rank 1: means over steps, not over events."""
    run = RunLog(folder, name="")
    return run.phases[1] | {"overlap": run.overlaps[1]["gradient_sync"]}


@pytest.mark.slow
def test_a_page_of_three_runs(tmp_path):
    runs = [
        write_run(tmp_path / name, history, flags, ranks)
        for name, history, flags, ranks in (
            ("a&b", full_history(), "--seed=1", 2),
            ("killed", TWO_KILLS, "--seed=2", 1),
            ("starting", TWO_KILLS[:1], "--seed=2", 1),
        )
    ]
    assert main([*map(str, runs), f"--out={tmp_path / 'page.html'}"]) == 0
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.headings == [
        "Summary",
        "Goodput",
        "Time line and restarts",
        "Curves",
        "Steps",
        "Checkpoints and memory",
        "Events",
        "Configuration",
    ]
    assert page.captions == [
        "Loss",
        "Accuracy",
        "Throughput",
        "Model FLOPs per second",
        "MFU",
        "Learning rate",
        "Gradient norm",
        "Loss scale",
        "Step times",
        "Phases by rank: a&b",
        "Stragglers: a&b",
        "Checkpoints: a&b",
        "Memory: a&b",
    ]
    words = " ".join(page.text)
    assert (
        "50.0 s (35.7 %)" in words
        and "PeerLostError: lost contact with rank 1" in words
        and "4 workers <b>& more</b>" in words
    )
    assert "input-bound: 28 % of the time waiting for data." in words and "gradient sync, hidden" in text
    assert runs_phases(tmp_path / "a&b") == pytest.approx(
        {"data_wait": 0.25, "backward": 0.5, "gradient_sync": 0.125 * 1500 / 2249, "overlap": 0.25}
    )
    assert (
        re.search(r"What differs.*?--seed\s+1\s+2\s+2\s+All 4 flags", words) and "8,192" in words
    )  # 64 samples/s of 128 tokens
    assert all(link.startswith("#") for link in page.links) and not re.search(r"@import|url\((?!#)", text)
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links} <= set(page.ids)
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == 15 and all(ElementTree.fromstring(svg) is not None for svg in svgs)
    assert len(text) < 2_000_000  # thousands of steps stay a small page


def test_text(tmp_path, capsys):
    assert main([str(write_run(tmp_path / "killed", TWO_KILLS)), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  goodput               35.7 % of 140.0 s" in lines
    assert any(
        line.split() == ["training", "50.0", "s", "35.7", "%", "steps", "that", "were", "kept"] for line in lines
    )
    assert any(
        line.split()[:5] == ["restarts", "36.0", "s", "25.7", "%"]
        and "5.0 s waiting for what failed, 6.0 s down, 15.0 s start-up, 10.0 s first steps" in line
        for line in lines
    )
    assert "  restart of attempt 1 after 52.0 s, from step 30 to 10: no final event: it was killed" in lines
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_the_page_is_in_the_run_folder_and_takes_the_place_of_no_other_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one, two = (write_run(tmp_path / name, TWO_KILLS) for name in ("one", "two"))
    for _ in range(2):  # again: a newer page
        assert main([str(one)]) == main([str(one), str(two)]) == 0
    said = "in one 35.7 %, in two 35.7 % of the time went into steps that were kept (goodput)."
    assert said in capsys.readouterr().out.splitlines()[1]
    assert sorted(path.name for path in one.iterdir()) == [
        "comparison.html",
        "flags.txt",
        "logs",
        "report.html",
    ] and sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    mine = tmp_path / "mine.html"
    mine.write_text("<title>mine</title>")
    with pytest.raises(ConfigError, match=r"--out=mine\.html already exists and is not a page of tfdist\.report"):
        main([str(one), "--out=mine.html"])
    assert mine.read_text() == "<title>mine</title>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, ""),
        (7, "7"),
        (207.6e6, "208 M"),
        (1.25e12, "1.25 T"),
        (999.9e9, "1 T"),
        (4.2e15, "4.2 P"),
        (3e18, "3,000 P".replace(",000", "e+03")),
    ],
)
def test_flops_have_the_unit_that_fits(value, text):
    assert with_prefix(value) == text


def test_curves_hold_the_kept_history_alone(tmp_path):
    run = RunLog(
        write_run(
            tmp_path / "run",
            [
                (1, 0, "start", 0, {}),
                (2, 0, "train", 5, {"train/loss": 1.0}),
                (3, 0, "train", 9, {"train/loss": 2.0}),
                (4, 1, "start", 5, {}),
                (5, 1, "train", 8, {"train/loss": 3.0}),
            ],
        ),
        name="",
    )
    assert run.series["train/loss"] == {5: 1.0, 8: 3.0}
    assert run.flags == {"source": "text", "sequence_length": "128", "shuffle": "false"}


def test_values_of_memory_are_named_without_their_unit(tmp_path):
    """Which stands on the axis."""
    values = {"memory/host_bytes": 2e9, "memory/device_peak_bytes": 3e9}
    history = [(1, 0, "start", 0, {}), (2, 0, "train", 1, values), (3, 0, "train", 2, values)]
    drawn = memory(RunLog(write_run(tmp_path / "run", history), name=""))
    assert re.findall(r">(rank 0: [^<]*)</text>", drawn) == ["rank 0: host", "rank 0: device peak"]


def test_what_is_no_run_folder_is_said(tmp_path):
    for argv, words in (
        ([str(tmp_path)], "is not a run folder"),
        ([], "RUN_DIR"),
        ([str(tmp_path), "--bogus"], "--bogus"),
        ([str(write_run(tmp_path / "empty", []))], "contains no event"),
        ([str(write_run(tmp_path / "run", TWO_KILLS))] * 2, "is given twice"),
        ([str(tmp_path / "run"), "--out=/nowhere/page.html"], "--out=/nowhere/page.html cannot be written"),
    ):
        with pytest.raises(ConfigError, match=words):
            main(argv)


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "run", TWO_KILLS) for parent in ("x", "y")]
    assert [run.name for run in read_runs([ReadRun(str(folder)) for folder in folders])] == ["x/run", "y/run"]


def test_text_needs_neither_tensorflow_nor_matplotlib(tmp_path):
    run = write_run(tmp_path / "run", TWO_KILLS)
    code = (
        f"import sys; from tfdist.report import main; main([{str(run)!r}, '--text']); print([name for name in"
        " ('tensorflow', 'keras', 'matplotlib') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        == "[]"
    )


def test_numbers():
    assert [long_time(seconds) for seconds in (37.24, 307.4, 11107, 99.99)] == [
        "37.2 s",
        "5:07 min",
        "3:05:07 h",
        "100.0 s",
    ]
    assert quantile([(1.0, 9), (5.0, 1)], 0.5) == 1.0 and quantile([(1.0, 9), (5.0, 1)], 0.95) == 5.0
