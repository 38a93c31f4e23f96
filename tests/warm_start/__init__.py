"""Processes of tests that start in 20 ms instead of 4 s of a core: forks of one that has imported TensorFlow, Keras and
tfdist, and has not used them.

    @pytest.fixture(scope="module", autouse=True)    in a folder's conftest.py (or: usefixtures("warm_start")): then
    def _warm(warm_start): ...                       `subprocess.Popen([sys.executable, "-m", "tfdist.train", ...])`
                                                     and all that it starts in turn are such forks
    @pytest.mark.usefixtures("real_start")           a test that looks at the start itself: processes as users have

A test need not know of it. `subprocess` asks the operating system for a process in one function, `_fork_exec`; that one
is replaced (client.py). Where the command is this Python with a module of tfdist or of the tests, or with a script, it
asks a zygote (zygote.py) for a fork, which makes itself what the command would be (forked.py): arguments, folder,
environment, descriptors, session, signals, `preexec_fn`. The fork becomes a child of the process that asked, not of the
zygote, so that waiting, signals and the end of the parent are as always. Every process that starts others has a zygote
of its own beside it, forked before it ran a line: what it starts knows nothing of what it has done.

Not as in a process of its own: modules are imported in another order, and all forks share one seed for the hashes of
strings. An environment that changes what is read while importing (`client.READ_BY_IMPORTS`), or anything else that a
fork cannot do, gets a real process.
"""

ZYGOTE = "zygote"  # what /proc/PID/comm says of one
