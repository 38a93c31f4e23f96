"""The job token: where it comes from, what is refused, and that it shows nowhere."""

import os

import pytest

from tfdist.control import token
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.launcher.job import Job, JobOptions

GOOD = "0123456789abcdef" * 2


def test_a_process_takes_it_out_of_its_environment(monkeypatch):
    monkeypatch.setattr(token, "_taken", "")
    monkeypatch.setenv(token.VARIABLE, f" {GOOD}\n")
    assert token.read(os.environ) == token.Secret(GOOD.encode())
    assert token.VARIABLE not in os.environ and token.read(os.environ).value == GOOD.encode()  # still known
    assert not token.read({})


def test_it_shows_in_no_text():
    secret = token.Secret(GOOD.encode())
    cluster = Cluster(secret=secret)
    assert all(
        GOOD not in text
        for text in (repr(secret), str(secret), repr(cluster), f"{secret} {cluster}", cluster.describe())
    )


def test_keys_differ_by_purpose_and_meeting():
    secret = token.Secret(GOOD.encode())
    keys = [
        secret.key("ring"),
        secret.key("ring", ""),
        secret.key("ring", "a", "b"),
        secret.key("ring", "ab"),
        secret.key("pulse"),
        token.Secret(b"x").key("ring"),
        token.Secret().key("ring"),
    ]
    assert len(set(keys)) == len(keys) and secret.key("ring", "a") == secret.key("ring", "a")


def test_a_file_of_ones_own_is_read(tmp_path):
    file = tmp_path / "token"
    file.write_text(GOOD + "\n")
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert token.read({token.VARIABLE: "another one, of the environment"}, str(file)) == token.Secret(GOOD.encode())


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o640, GOOD, "can be used by others (mode 0640): run `chmod 600"),
        (0o604, GOOD, "mode 0604"),
        (0o620, GOOD, "mode 0620"),
        (0o600, "short", "has 5 characters"),
        (0o600, "", "has 0 characters"),
        (0o600, "\udcff" * 20, "not a text file"),
    ],
)
def test_files_that_do_not_serve_are_refused(mode, text, words, tmp_path):
    file = tmp_path / "token"
    file.write_bytes(text.encode(errors="surrogateescape"))
    file.chmod(mode)
    with pytest.raises(ConfigError, match="--job_token_file=") as error:
        token.read({}, str(file))
    assert words in str(error.value) and GOOD not in str(error.value)


def test_what_is_no_file_of_ones_own_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, words in (
        (tmp_path / "missing", "cannot be read"),
        (tmp_path, "cannot be read"),
        (tmp_path / "pipe", "not a plain file"),
    ):
        with pytest.raises(ConfigError, match=words):
            token.read({}, str(name))
    if os.geteuid() == 0:
        (tmp_path / "foreign").write_text(GOOD)
        (tmp_path / "foreign").chmod(0o600)
        os.chown(tmp_path / "foreign", 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            token.read({}, str(tmp_path / "foreign"))


def test_a_token_that_can_be_guessed_is_refused():
    with pytest.raises(ConfigError, match=f"{token.VARIABLE} in the environment has 6 characters"):
        token.read({token.VARIABLE: "secret"})


@pytest.mark.parametrize(
    ("peers", "rank", "environment", "warned"),
    [
        (("10.0.0.1:1", "10.0.0.2:1"), 0, {}, True),
        (("a:1", "b:1"), 0, {}, True),
        (("127.0.0.1:1", "10.0.0.2:1"), 0, {}, True),
        (("10.0.0.1:1", "10.0.0.2:1"), 1, {}, False),
        (("10.0.0.1:1", "10.0.0.2:1"), 0, {token.VARIABLE: GOOD}, False),
        (("127.0.0.1:1", "127.0.0.1:2"), 0, {}, False),
        (("[::1]:1", "localhost:2"), 0, {}, False),
        (("a:1",), 0, {}, False),
    ],
)
def test_one_sentence_warns_of_an_open_job(peers, rank, environment, warned, capsys):
    cluster = Cluster("worker", rank, rank, len(peers), peers, {"worker": list(peers)})
    assert bool(token.with_token(cluster, dict(environment), file="").secret) == bool(environment)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == warned and all("this job has no token" in line for line in lines)


def test_each_job_has_its_own_unless_one_is_given(tmp_path):
    made = [
        Job(1, tmp_path, JobOptions(grace=1.0, environment=environment)).environment[token.VARIABLE]
        for environment in ({}, {}, {token.VARIABLE: GOOD}, {token.VARIABLE: ""})
    ]
    assert made[2] == GOOD and len(set(made)) == 4 and all(len(value) >= 32 for value in made)
