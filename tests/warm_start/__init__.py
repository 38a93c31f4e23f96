"""Starts processes of tests in 20 ms instead of 4 s of a core: they are forks of a process that has imported
TensorFlow, Keras and tfdist, and has not used them.

    @pytest.fixture(scope="module", autouse=True)    in a folder's conftest.py (or: usefixtures("warm_start")): then
    def _warm(warm_start): ...                       `subprocess.Popen([sys.executable, "-m", "tfdist.train", ...])`
                                                     and all processes that it starts in turn are such forks
    @pytest.mark.usefixtures("real_start")           for a test of the start itself: processes as users have them

A test need not know about it. `subprocess` asks the operating system for a process in one function, `_fork_exec`, which
client.py replaces. If the command is this Python with a module of tfdist or of the tests, or with a script, it asks a
zygote (zygote.py) for a fork. The fork turns itself into what the command would be (forked.py): arguments, folder,
environment, descriptors, session, signals, `preexec_fn`. The fork becomes a child of the process that asked, not of the
zygote, so waiting, signals and the end of the parent work as usual. Every process that starts others has its own
zygote, forked before the process ran a line: so its children know nothing of what it has done.

Differences from a real process: modules are imported in another order, and all forks share one seed for the hashes of
strings. A command whose environment changes what imports read (`client.READ_BY_IMPORTS`), or that needs anything else
that a fork cannot do, gets a real process.
"""

ZYGOTE = "zygote"  # its name in /proc/PID/comm
