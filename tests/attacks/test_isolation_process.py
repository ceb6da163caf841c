"""Isolation cases about other processes: what they know, what can be done to them, what is inherited from them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from stockade.sandbox import ExitKind
from stockade.sandbox._backend import BASE_ENV, PROXY_ENV
from stockade.sandbox._proc import descendants
from tests.attacks.conftest import CARELESS


@pytest.mark.promise("S2.2")
def test_a02_secrets_in_own_environment(node):
    source = "say(dict(os.environ))"
    assert sum(node.token in value for value in node.plain(source).values()) >= 6
    found = node.inside(source)
    assert not [name for name, value in found.items() if node.token in value]
    # Names that a shell or Python itself adds are no secrets of the launcher.
    assert set(found) - {"PWD", "SHLVL", "_", "LC_CTYPE"} == {*BASE_ENV, *PROXY_ENV}


PROC_1 = """
def read(path):
    with open(path, "rb") as file:
        return file.read().decode("latin-1")
say({name: attempt(read, f"/proc/{ARGS}/{name}") for name in ("environ", "cmdline", "maps", "auxv")})
"""


@pytest.mark.promise("S2.2")
def test_a03_launchers_environment_in_proc_1(node):
    """bubblewrap #725: ``--clearenv`` empties the command's environment, process 1 keeps the launcher's."""
    careless = node.careless(PROC_1, 1, options=(*CARELESS, "--clearenv"))
    assert node.token in careless["environ"]
    found = node.inside(PROC_1, 1)
    assert found["environ"] == "EACCES"
    assert node.token not in str(found)
    words = found["cmdline"].split("\0")
    assert words[1:5] == ["-I", "-S", "-B", "/sandbox/agent.py"]
    assert not [word for word in words if "/" in word[1:] and not word.startswith(("/usr/", "/sandbox/"))]


def test_a03_environment_of_a_command_is_built_from_nothing(node):
    """A command's own /proc entry, which a later command of the same sandbox may read, has only what it was given."""
    found = node.inside(PROC_1, "self")
    assert node.token not in str(found)
    assert node.token in str(node.plain(PROC_1, "self"))


SCAN = """
# What is looked for comes backwards, so that the probe's own arguments do not hold it.
found, pids = [], [name for name in os.listdir("/proc") if name.isdigit()]
for pid in pids:
    for name in ("environ", "cmdline", "fd", "maps"):
        path = f"/proc/{pid}/{name}"
        try:
            if name == "fd":
                content = " ".join(os.readlink(f"{path}/{fd}") for fd in os.listdir(path))
            else:
                content = open(path, "rb").read().decode("latin-1")
        except OSError:
            continue
        if ARGS[::-1] in content:
            found.append(name)
say([len(pids), sorted(set(found))])
"""


@pytest.mark.promise("S2.3")
def test_a04_processes_outside(node):
    outside, found = node.plain(SCAN, node.token[::-1])
    assert {"environ", "cmdline"} <= set(found)
    assert node.careless(SCAN, node.token[::-1], CARELESS[:-1])[1]  # without a pid namespace of its own
    inside, found = node.inside(SCAN, node.token[::-1])
    assert found == []
    assert inside == 2 < outside  # the guest agent and the probe


SIGNAL = "say([attempt(os.kill, pid, 0) for pid in ARGS])"


@pytest.mark.promise("S2.3")
def test_a25_signals(node):
    """Signal 0: permission to send any other. kill(-1) inside ends what is inside, and only that."""
    pid = node.facts["pid"]
    assert node.plain(SIGNAL, [pid]) == ["done"]
    assert node.inside(SIGNAL, [pid, os.getpid(), os.getppid()]) == ["ESRCH"] * 3
    everything = """
child = os.fork()
if child == 0:
    time.sleep(60)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(-1, signal.SIGTERM)
say(os.waitpid(child, 0)[1])
"""
    assert node.inside(everything) == 15
    assert node.plain(SIGNAL, [pid]) == ["done"]


TRACE = """
pid = ARGS
class Area(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
local, remote = Area(ctypes.addressof(buffer), 8), Area(ctypes.addressof(buffer), 8)
child = os.fork()
if child == 0:
    time.sleep(60)
def vm(name, target):
    libc(name, target, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
def memory(target):
    os.close(os.open(f"/proc/{target}/mem", os.O_RDONLY))
def descriptor(target):
    handle = os.pidfd_open(target)
    libc("syscall", 438, handle, 0, 0)
answers = {
    "ptrace": attempt(libc, "ptrace", 16, pid, None, None), "readv": attempt(vm, "process_vm_readv", pid),
    "writev": attempt(vm, "process_vm_writev", pid), "mem": attempt(memory, pid), "fd": attempt(descriptor, pid),
    "own child ptrace": attempt(libc, "ptrace", 16, child, None, None),
    "own child readv": attempt(vm, "process_vm_readv", child), "own child fd": attempt(descriptor, child),
}
os.kill(child, 9)
say(answers)
"""


@pytest.mark.promise("S2.3")
def test_a26_tracing(node):
    """Outside, at least what every process may do to its child works; a pid of the host has no meaning inside."""
    outside = node.plain(TRACE, node.facts["pid"])
    assert [outside[f"own child {name}"] for name in ("ptrace", "readv", "fd")] == ["done"] * 3
    inside = node.inside(TRACE, node.facts["pid"])
    assert set(inside.values()) <= {"ESRCH", "EPERM", "ENOENT"}
    assert inside["own child ptrace"] == inside["own child readv"] == inside["own child fd"] == "EPERM"


def test_a26_the_guest_agent(node):
    """The one process inside that talks to the outside runs under the same uid, and is shut all the same."""
    source = """
def memory(flags):
    os.close(os.open("/proc/1/mem", flags))
say([attempt(memory, os.O_RDONLY), attempt(memory, os.O_RDWR), attempt(os.listdir, "/proc/1/fd"),
     attempt(os.open, "/proc/1/fd/3", os.O_RDWR), attempt(os.listdir, "/proc/1/task/1/fd"),
     attempt(os.readlink, "/proc/1/exe"), attempt(libc, "ptrace", 16, 1, None, None),
     attempt(libc, "syscall", 438, os.pidfd_open(1), 3, 0)])
"""
    assert set(node.inside(source)) <= {"EACCES", "EPERM"}
    # A process of one's own that did not hide itself is open to a command beside it.
    mine = source.replace("/proc/1/task/1/", "/proc/1/").replace("/proc/1/", "/proc/self/")
    assert node.inside(mine)[:3] == ["done"] * 3


def test_a35_setuid_programs(node):
    """A setuid copy gains nothing: no_new_privs is set, every mount is nosuid, and the bit is only a bit."""
    source = """
import shutil
path = "/tmp/setuid-" + ARGS
shutil.copy("/usr/bin/id", path)
os.chmod(path, 0o6755)
words = dict(line.split(":", 1) for line in open("/proc/self/status"))
flags = [line.split()[5] for line in open("/proc/self/mountinfo")]
euid = os.popen(path + " -u").read().strip()
os.unlink(path)
say([words["NoNewPrivs"].strip(), all("nosuid" in flag for flag in flags), euid, os.getuid()])
"""
    assert node.inside(source, node.token) == ["1", True, "1000", 1000]
    outside = node.plain(source, node.token)
    assert outside[:2] == ["0", False] or outside[0] == "1"  # a test run that is itself under no_new_privs


DESCRIPTORS = """
found = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        pass  # the listing's own
say([sorted(int(fd) for fd in found), attempt(os.listdir, f"/proc/self/fd/{ARGS}"), attempt(os.chdir, f"/proc/self/fd/{ARGS}")])
"""


@pytest.mark.promise("S2.2")
def test_a41_no_inherited_descriptor(node):
    """CVE-2024-21626: a descriptor of a host directory that any child of the launcher inherits."""
    leak = node.facts["leak"]
    for way in (node.plain, node.careless):
        numbers, listed, entered = way(DESCRIPTORS, leak)
        assert leak in numbers
        assert listed == entered == "done"
    assert node.inside(DESCRIPTORS, leak) == [[0, 1, 2], "ENOENT", "ENOENT"]


def test_a41_working_directory_in_a_descriptor(owner, sandbox):
    for number in range(12):
        result = owner.exec(sandbox, ["/bin/pwd"], cwd=f"/proc/self/fd/{number}")
        assert result.stdout in (b"", b"/workspace\n"), result.stdout
    result = owner.exec(sandbox, ["/bin/cat", "/proc/self/cwd/etc/passwd"], cwd="/proc/1/root")
    assert result.exit.code in (126, 127) or b"sandbox:x:1000" in result.stdout  # its own root, or none


OPTIONS = ["--share-net", "--bind", "--ro-bind", "--dev-bind", "--args", "--", "--unshare-user", "-c"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a45_commands_that_look_like_options(owner, sandbox, option):
    result = owner.exec(sandbox, [option, "/", "/mnt", "/bin/true"])
    assert result.exit.return_code == 127
    owner.run(sandbox.write_file(f"/workspace/{option}", b"#!/bin/sh\necho ran as $1\n"))
    assert owner.exec(sandbox, ["/bin/chmod", "755", f"./{option}"]).exit.code == 0
    assert owner.exec(sandbox, [f"./{option}", "--bind"]).stdout == b"ran as --bind\n"


def test_a45_works_on_a_launcher_that_appends_words(node):
    """CVE-2024-32462: words of the rollout placed where the runtime still reads options."""
    planted = node.facts["credentials"][0]
    source = "say(open('/dev/shm/here').read())"
    options = (*CARELESS, "--ro-bind", planted, "/dev/shm/here")  # these last three are the "command"
    assert node.careless(source, options=options) == node.token


def test_a45_words_of_the_caller_never_meet_a_shell(owner, sandbox):
    words = ["$(id)", "`id`", ";id", "|id", "&&id", "*", "~", "'", '"', "\\", "\n", "-n", "\x1b[0m", "é", "\udc80"]
    result = owner.exec(sandbox, owner.probe("say(ARGS)", words))
    assert result.exit.code == 0
    echoed = owner.exec(sandbox, ["/usr/bin/printf", "%s\\0", *words]).stdout
    assert echoed == b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)


def test_a45_nul_and_bad_names_are_refused(owner, sandbox):
    for argv, env in (
        (["a\0b"], {}),
        ([], {}),
        (["true"], {"A=B": "x"}),
        (["true"], {"": "x"}),
        (["true"], {"A": "\0"}),
    ):
        with pytest.raises(ValueError, match="NUL"):
            owner.exec(sandbox, argv, env=env)
    assert owner.exec(sandbox, ["/bin/true"]).exit.code == 0


def test_a58_priority_and_oom_score(node):
    """Nobody may make the trainer die first, or run before everybody else.

    Both need a capability outside as well, which the tests' own user need not have: nothing to compare with.
    """
    source = """
def score(value):
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(value)
before = int(open("/proc/self/oom_score_adj").read())
say([before, attempt(score, "-1"), attempt(os.nice, -5), attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))])
"""
    before, lowered, nicer, real_time = node.inside(source)
    assert before == 900
    assert lowered in ("EACCES", "EPERM")
    assert nicer in ("EPERM", "EACCES")
    assert real_time == "EPERM"


@pytest.mark.promise("S2.9")
def test_a60_processes_that_outlive_a_plain_launcher(owner, sandbox):
    """Double fork, new session, every signal ignored: it survives its parent, and not its sandbox."""
    source = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            if number not in (9, 19):
                signal.signal(number, signal.SIG_IGN)
        os.close(1), os.close(2)
        time.sleep(600)
    os._exit(0)
os.wait()
found = []
while not found:
    found = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != str(os.getpid())
             and open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1] == ARGS
             and open(f"/proc/{pid}/cmdline", "rb").read() == open("/proc/self/cmdline", "rb").read()]
say(int(found[0]))
"""
    assert owner.inside(sandbox, source, "1") > 1
    outer = [pid for pid in descendants(sandbox.init_pid) if pid != sandbox.init_pid]
    assert len(outer) == 1
    assert os.path.exists(f"/proc/{outer[0]}")
    owner.run(sandbox.destroy())
    assert not os.path.exists(f"/proc/{outer[0]}")


def test_a60_plain_daemon_survives_its_launcher():
    """The same daemon without a sandbox: the launcher is killed, the daemon is not."""
    source = "import os, sys, time\nif os.fork() == 0:\n os.setsid()\n print(os.getpid(), flush=True)\n time.sleep(30)\ntime.sleep(30)"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", source], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        daemon = int(launcher.stdout.readline())
        launcher.kill()
        launcher.wait()
        time.sleep(0.1)
        os.kill(daemon, 0)
        os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize(
    "source",
    [
        "[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]; say(1); time.sleep(600)",
        "say(1); os.kill(os.getpid(), signal.SIGSTOP)",
        "os.fork(); say(1); os.kill(-1, signal.SIGSTOP); time.sleep(600)",
    ],
    ids=["ignores every signal", "stops itself", "stops everything"],
)
def test_a61_programs_that_will_not_end(owner, source):
    sandbox = owner.create()
    result = owner.exec(sandbox, owner.probe(source), timeout_s=0.5)
    assert result.exit.kind is ExitKind.TIMEOUT
    assert sandbox.ended is None, "the command could be ended alone"
    owner.destroy(sandbox)


def test_a61_a_guest_that_is_stopped_is_killed_within_the_grace(owner):
    """Only from outside can pid 1 be stopped; a command that cannot be ended takes its sandbox with it."""
    sandbox = owner.create()

    async def attack():
        running = asyncio.ensure_future(sandbox.exec(["/bin/sleep", "600"], timeout_s=0.2))
        await asyncio.sleep(0.1)
        os.kill(sandbox.init_pid, signal.SIGSTOP)
        return await running

    assert owner.run(attack()).exit.kind is ExitKind.TIMEOUT
    assert sandbox.ended is not None
    owner.destroy(sandbox)


def test_a62_core_dumps(owner, sandbox):
    """The limit is 1, not 0: a dump into a pipe, to a root process of the host, ignores 0 (core(5)).

    What the host does with dumps is a setting of the whole machine, so the attack itself cannot be shown here.
    """
    source = """
import resource
if os.fork() == 0:
    os.abort()
_, status = os.wait()
say([resource.getrlimit(resource.RLIMIT_CORE), os.WCOREDUMP(status), os.WTERMSIG(status), os.listdir("/workspace")])
"""
    assert owner.inside(sandbox, source) == [[1, 1], False, 6, []]
    raised = "import resource\ntry:\n resource.setrlimit(resource.RLIMIT_CORE, (1, 1 << 20))\n say('raised')\nexcept ValueError:\n say('refused')"
    assert owner.inside(sandbox, raised) == "refused"
