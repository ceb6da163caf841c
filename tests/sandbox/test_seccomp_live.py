"""The shipped filter, loaded by bubblewrap as an ordinary user: attacks that work without it, programs that work with it.

The sandbox of these tests is weak on purpose: the whole file system is visible, the process is root in its user
namespace and holds every capability there. What is refused here is refused by the filter alone.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.sandbox import _seccomp
from stockade.sandbox._tools import find_bubblewrap
from tests.sandbox.test_seccomp import NUMBERS
from tests.support import requires

PYTHON = "/usr/bin/python3"
NOBODY = 65534
SCRATCH = "/dev/shm"
"""Part of bubblewrap's own /dev, so it exists everywhere and hides no checkout and no venv."""
MACHINE = os.uname().machine
CASES = {
    "A19": """socket-packet socket-raw-inet socket-raw-inet6 socket-vsock socket-alg socket-tipc socket-xdp socket-rds
        socket-sctp socket-netfilter socketpair-tipc""",
    "A24": "shmget semget msgget",
    "A26": "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp",
    "A27": "add_key request_key keyctl",
    "A28": "unshare-user clone-user clone3-user setns",
    "A29": "unshare-user-net",
    "A30": """mount-tmpfs umount2 fsopen fspick open_tree move_mount mount_setattr chroot pivot_root mknod-whiteout""",
    "A31": "io_uring_setup io_uring_enter",
    "A32": """bpf perf_event_open userfaultfd quotactl fanotify_init memfd_secret reboot sethostname acct swapon init_module
        kexec_load lookup_dcookie syslog mbind set_mempolicy personality openat2 io_setup seccomp-listener process_madvise""",
    "A33": "name_to_handle_at open_by_handle_at",
    "A36": "tiocsti tiocsti-upper-bits tioclinux tiocsetd",
    "A58": "sched_fifo sched_setattr sched_setaffinity",
    "A63": "clock_settime settimeofday adjtimex clock_adjtime",
}
ATTACKS = [pytest.param(name, id=f"{case}-{name}") for case, names in CASES.items() for name in names.split()]

# Calls for which a kernel asks for a capability outside before it looks at anything else: nothing in a user namespace
# gets further, so the filter is a second wall there, and "who answered" cannot be seen. (userfaultfd, syslog, bpf and
# perf depend on sysctls; kernels without a subsystem say ENOSYS.) What the filter answers is proven in test_seccomp.py.
SECOND_WALL = {"acct", "swapon", "init_module", "kexec_load", "syslog", "userfaultfd", "perf_event_open", "bpf"}
ANSWERED_ENOSYS = {
    *(
        "clone3-user",
        "fsopen",
        "fspick",
        "open_tree",
        "move_mount",
        "mount_setattr",
        "io_uring_setup",
        "io_uring_enter",
    ),
    *("openat2", "io_setup", "process_madvise"),
}
# With every capability in a user namespace of its own, which a sandbox would have after A28, these attacks SUCCEED on
# any kernel of the last years.
WORKS_WITHOUT = {
    *("socket-packet", "socket-raw-inet", "socket-netfilter", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("unshare-user", "unshare-user-net", "clone-user", "clone3-user", "mount-tmpfs", "fsopen", "open_tree", "chroot"),
    *("sethostname", "shmget", "semget", "msgget", "personality", "openat2", "seccomp-listener", "adjtimex"),
    *("mknod-whiteout",),
}


def bubblewrap(
    command: list[str],
    *,
    filtered: bool,
    options: tuple[str, ...] = (),
    data: bytes = b"",
    stay: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run ``command``, as nobody when root unless ``stay``; bubblewrap goes by descriptor, wherever the venv lies."""
    drop = os.geteuid() == 0 and not stay
    with open(find_bubblewrap().path, "rb") as program, tempfile.TemporaryFile() as code:
        code.write(_seccomp.filter_bytes())
        code.seek(0)
        seccomp = ["--seccomp", str(code.fileno())] if filtered else []
        return subprocess.run(
            [
                *(f"/proc/self/fd/{program.fileno()}", "--unshare-user", "--unshare-all", "--die-with-parent"),
                *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--chdir", SCRATCH),
                *(*options, *seccomp, "--", *command),
            ],
            input=data,
            pass_fds=(program.fileno(), code.fileno()),
            capture_output=True,
            cwd="/",
            timeout=60,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "LC_ALL": "C.UTF-8"},
            user=NOBODY if drop else None,
            group=NOBODY if drop else None,
            extra_groups=[] if drop else None,
        )


@pytest.fixture(scope="module", autouse=True)
def _able() -> None:
    requires(os.path.exists(PYTHON), "no /usr/bin/python3")
    tried = bubblewrap(["/bin/true"], filtered=False)
    requires(tried.returncode == 0, f"bubblewrap does not run here: {tried.stderr.decode()}")


def battery(*, filtered: bool) -> dict[str, int]:
    source = (Path(__file__).parent / "seccomp_probes.py").read_bytes()
    done = bubblewrap(
        [PYTHON, "-I", "-", json.dumps(NUMBERS[MACHINE])],
        filtered=filtered,
        options=("--uid", "0", "--gid", "0", "--cap-add", "ALL"),
        data=source,
    )
    assert done.returncode == 0, done.stderr.decode()
    answers: dict[str, int] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def without() -> dict[str, int]:
    return battery(filtered=False)


@pytest.fixture(scope="module")
def within() -> dict[str, int]:
    return battery(filtered=True)


def test_the_battery_is_the_table(within):
    assert set(within) == {name for names in CASES.values() for name in names.split()}


@pytest.mark.promise("S2.5")
@pytest.mark.parametrize("name", ATTACKS)
def test_isolation_case(without, within, name):
    """Each ends at the filter, whatever the process holds; without the filter the kernel itself answers, or obeys."""
    refusal = errno.ENOSYS if name in ANSWERED_ENOSYS else errno.EPERM
    assert within[name] == refusal
    if name in WORKS_WITHOUT:
        assert without[name] == 0
    elif name not in SECOND_WALL | ANSWERED_ENOSYS:  # some kernels are built without io_uring, AIO and so on
        assert without[name] != refusal


def filtered(command: list[str], *, stay: bool = False) -> str:
    """Output of a program that must work under the filter, as an ordinary user with nothing special."""
    done = bubblewrap(command, filtered=True, stay=stay)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.promise("S2.5")
def test_the_filter_is_on():
    assert "Seccomp:\t2" in filtered(["/bin/cat", "/proc/self/status"])


@pytest.mark.parametrize("code", ["int $0x80", "x32"])
def test_another_system_call_table_ends_the_process(code, tmp_path_factory):
    """A 32-bit or x32 call kills: 0x40000000 + 39 is getpid in the x32 table, int 0x80 with 20 in the 32-bit one."""
    requires(MACHINE == "x86_64" and shutil.which("gcc"), "needs an x86_64 with gcc", must_run_in_ci=False)
    body = (
        'long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20)); return 0;'
        if code != "x32"
        else ("syscall(0x40000000 + 39); return 0;")
    )
    script = f"printf '%s\\n' '#include <unistd.h>' 'int main(void) {{ {body} }}' > a.c && gcc -w -o a a.c && ./a"
    assert bubblewrap(["/bin/sh", "-c", script], filtered=False).returncode in (0, 139)
    done = bubblewrap(["/bin/sh", "-c", script], filtered=True)
    assert done.returncode == 128 + 31, done.stderr.decode()  # SIGSYS


THREADS = """
import asyncio, multiprocessing, subprocess, threading, socket, sqlite3, ssl, tempfile, mmap, select, signal, os
done = []
threads = [threading.Thread(target=done.append, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(done) == list(range(8))
assert subprocess.run(["/bin/echo", "hi"], capture_output=True, check=True).stdout == b"hi\\n"
async def main():
    p = await asyncio.create_subprocess_exec("/bin/cat", stdin=-1, stdout=-1)
    out, _ = await p.communicate(b"async")
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await r.read() == b""
    w.close(); server.close()
    return out
assert asyncio.run(main()) == b"async"
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
assert socket.getaddrinfo("127.0.0.1", 80)
assert socket.if_nameindex()
db = sqlite3.connect(os.path.join(tempfile.mkdtemp(), "db")); db.execute("create table t(x)"); db.commit()
signal.setitimer(signal.ITIMER_REAL, 10)
print("all good")
"""


def test_python_threads_processes_asyncio_sockets():
    assert filtered([PYTHON, "-c", THREADS]) == "all good\n"


def test_bash_pipelines():
    script = (
        "set -euo pipefail; seq 1000 | sort -rn | head -n 3 | tr '\\n' ,; f=$(mktemp); cat <(echo sub) > $f; cat $f"
    )
    requires(os.path.exists("/bin/bash"), "no bash", must_run_in_ci=False)
    # head ends the pipe early: without pipefail's 141 this is 1000,999,998,
    assert filtered(["/bin/bash", "-c", script.replace("set -euo pipefail; ", "")]) == "1000,999,998,sub\n"
    assert filtered(["/bin/bash", "-c", "sleep 0.01 & wait $!; mkfifo p; echo x > p & cat p; ulimit -n"]).startswith(
        "x\n"
    )


def needs(program: str) -> str:
    path = shutil.which(program, path="/usr/bin:/bin")
    requires(path, f"no {program} in /usr/bin", must_run_in_ci=False)
    return str(path)


def test_git():
    script = """
        git init -q r && cd r && echo a > f && git add f
        git -c user.name=n -c user.email=e@x commit -q -m one && git mv f g && git -c user.name=n -c user.email=e@x commit -qm two
        git gc -q && git clone -q . ../c && cd ../c && git log --oneline | wc -l && git status --short"""
    needs("git")
    assert filtered(["/bin/sh", "-ec", script]).strip() == "2"


def test_node():
    code = """
        const {execSync} = require('child_process'), {Worker} = require('worker_threads'), fs = require('fs');
        fs.writeFileSync('x', execSync('echo child'));
        require('zlib').gzip('a', () => require('net').createServer(s => s.end('net')).listen(0, '127.0.0.1', function () {
          require('net').connect(this.address().port).on('data', d => {
            new Worker("require('worker_threads').parentPort.postMessage('worker')", {eval: true})
              .on('message', m => { console.log(fs.readFileSync('x') + d + ' ' + m); process.exit(0); });
          });
        }));"""
    assert filtered([needs("node"), "-e", code]) == "child\nnet worker\n"


def test_gcc_and_make():
    needs("gcc")
    needs("make")
    script = """
        printf '#include <stdio.h>\\n#include <pthread.h>\\nvoid *f(void *p) { return p; }\\n' > a.c
        printf 'int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("built"); }\\n' >> a.c
        printf 'a: a.c\\n\\tgcc -O2 -pthread -o a a.c\\n' > Makefile
        make -j2 -s a && ./a"""
    assert filtered(["/bin/sh", "-ec", script]) == "built\n"


def test_curl():
    curl = needs("curl")
    assert filtered([curl, "--version"]).startswith("curl ")
    server = f"{PYTHON} -m http.server -b 127.0.0.1 8123 2>/dev/null & for i in 1 2 3 4 5 6 7 8 9; do "
    fetch = f"{curl} -sf http://127.0.0.1:8123/ >/dev/null && echo fetched && exit 0; sleep 0.3; done; exit 1"
    assert filtered(["/bin/sh", "-c", server + fetch]) == "fetched\n"


def test_ordinary_tools():
    script = """
        mkdir d && cd d && seq 100 > a && cp -a a b && ln a c && ln -s a l && mv b e && touch -d yesterday e
        tar czf t.tgz a c l && tar tzf t.tgz | wc -l && find . -type f | wc -l && dd if=/dev/zero of=z bs=1k count=9 2>&1 | wc -l
        chmod 700 a && stat -c %a a && timeout 5 true && nice -n 5 true && nohup true 2>/dev/null && df . > /dev/null
        grep -c 1 a && sed -i s/1/2/ a && awk 'END {print NR}' a && xz -k z && sha256sum z.xz | wc -l && rm -r ../d"""
    assert filtered(["/bin/sh", "-ec", script]).split() == ["3", "4", "3", "700", "20", "100", "1"]


def interpreters() -> Iterator[str]:
    yield from dict.fromkeys((PYTHON, sys.executable, shutil.which("python3") or PYTHON))


@pytest.mark.parametrize("module", ["pip", "pytest", "numpy"])
def test_python_packages(module):
    """The interpreter that has the package may lie in a private folder, so here the caller's uid stays."""
    code = {
        "pip": "import pip._internal.cli.main as m; raise SystemExit(m.main(['--version']))",
        "pytest": "import pytest; open('test_a.py', 'w').write('def test(): pass'); "
        "raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', '.']))",
        "numpy": "import numpy as n; a = n.random.rand(300, 300); print((a @ n.linalg.inv(a)).trace().round())",
    }[module]
    for python in interpreters():
        if (
            subprocess.run(
                [python, "-c", f"import {module}"], capture_output=True, check=False, cwd="/", env={}
            ).returncode
            == 0
        ):
            out = filtered([python, "-W", "ignore", "-c", code], stay=True)
            assert {"pip": "pip ", "pytest": "1 passed", "numpy": "300.0"}[module] in out
            return
    requires(False, f"no interpreter with {module}", must_run_in_ci=False)


def test_a_program_may_still_confine_itself():
    """seccomp() without a listener stays open: browsers, OpenSSH and build tools use it."""
    number = NUMBERS[MACHINE]["seccomp"]
    code = f"""
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
filter = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 1, ctypes.addressof(filter)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
print(libc.syscall({number}, 1, 0, program))"""
    assert filtered([PYTHON, "-c", code]) == "0\n"
