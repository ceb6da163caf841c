"""The agent inside a sandbox: process 1 of its pid namespace, the parent of every command of a rollout.

It is copied into the sandbox and started as ``python3 -I -S -B /sandbox/agent.py LIMITS…`` by whatever
Python (≥ 3.8) the sandbox has, so it imports built-in modules only: ``json`` or ``socket`` alone would double
its start-up time. It speaks on descriptor 3, a SOCK_SEQPACKET socket to the node agent:

request   ``X`` exec: header, then NUL-separated argv, cwd and environment; descriptors stdin, stdout, stderr
          and, for a pair of graders, two pipe ends that become descriptors 3 and 4
          ``K`` kill: everything that was started since that exec began and belongs to no other one
answer    ``R`` ready; ``E`` one exec ended: wait status and resource usage; ``F`` one could not start

Why a process inside: joining from outside with setns(2) gets neither the seccomp filter nor the limits.
Why pid 1: signals from inside the namespace do not reach it. Why undumpable: ``/proc/1/mem`` and
``/proc/1/fd`` would else be open to every command, which runs under the same uid.
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket
import _struct
import errno
import os
import resource
import select
import sys
import time

_SOL_SOCKET, _SCM_RIGHTS = 1, 1
_MSG_CMSG_CLOEXEC = 0x40000000  # a command gets its copies at 0, 1, 2 … and not these as well
_HEADER = _struct.Struct("<cQIIB")  # kind, exec id, number of arguments, number of variables, descriptors
_ENDED = _struct.Struct("<cQiQQ")  # kind, exec id, wait status, CPU ns, maximum resident bytes
_PACKET = 1 << 18
# Python ignores the first two and this process the third; what is ignored stays so across exec.
# All of them: what this process ignores, or whoever started the node agent did (nohup), no command shall inherit.
_RESET = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_TRANSIENT = (errno.EAGAIN, errno.ENOMEM)


def _undumpable():
    try:
        from _ctypes import call_function, dlopen, dlsym

        result = call_function(dlsym(dlopen(None, 2), "prctl"), (4, 0, 0, 0, 0))  # type: ignore[arg-type]
    except (ImportError, AttributeError, OSError):
        import ctypes

        result = ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    if result != 0:
        sys.exit("prctl(PR_SET_DUMPABLE) failed")


def _limit(words):
    """Take on the limits in ``name=value`` words; hard ones, so that no command, which inherits them, raises any."""
    for word in words:
        name, _, text = word.partition("=")
        number, value = getattr(resource, "RLIMIT_" + name), int(text)
        hard = resource.getrlimit(number)[1]
        bound = value if hard < 0 else min(value, hard)  # -1 is "unlimited"
        resource.setrlimit(number, (bound, bound))


class Guest:
    def __init__(self):
        self.control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, 3)
        os.set_inheritable(3, False)
        self.running = {}  # pid → (exec id, start in clock ticks)
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a signal with a handler does reach pid 1 from inside

    def serve(self):
        poll = select.poll()
        poll.register(3, select.POLLIN)
        poll.register(self.wake_read, select.POLLIN)
        self.control.send(b"R")
        while True:
            for fd, _ in poll.poll():
                if fd == 3:
                    if not self.receive():
                        return
                else:
                    try:
                        os.read(fd, 512)
                    except BlockingIOError:
                        pass
                    self.reap()

    def receive(self):
        space = _socket.CMSG_SPACE(5 * 4)
        data, ancillary, _, _ = self.control.recvmsg(_PACKET, space, _MSG_CMSG_CLOEXEC)
        if not data:
            return False
        fds: list[int] = []
        for level, kind, content in ancillary:
            if (level, kind) == (_SOL_SOCKET, _SCM_RIGHTS):
                fds += _struct.unpack("%di" % (len(content) // 4), content)
        kind, exec_id, arguments, variables, _ = _HEADER.unpack_from(data)
        if kind == b"K":
            self.kill(exec_id)
            return True
        body = data[_HEADER.size :]
        if not body:  # too long for a packet: it lies in a memory file sent as the first descriptor
            with open(fds.pop(0), "rb") as file:
                body = file.read()
        words = body.split(b"\0")
        argv, cwd, env = words[:arguments], words[arguments], words[arguments + 1 : arguments + 1 + variables]
        try:
            self.start(exec_id, argv, cwd, env, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def start(self, exec_id, argv, cwd, env, fds):
        """Start one command. posix_spawn(3) does not copy this process's page tables, as fork(2) would."""
        table = dict(word.split(b"=", 1) for word in env)
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
        try:
            os.chdir(cwd)
            path = _search(argv[0], table.get(b"PATH", b""))
            pid = os.posix_spawn(path, argv, table, file_actions=actions, setsid=True, setsigdef=_RESET)
        except OSError as error:
            if error.errno in _TRANSIENT:
                self.control.send(_HEADER.pack(b"F", exec_id, 0, error.errno, 0))
                return
            # As a shell would: the command's own standard error says why, 127 not found, 126 not executable.
            status = 127 if isinstance(error, FileNotFoundError) else 126
            what = error.filename if isinstance(error.filename, bytes) else argv[0]
            _complain(fds[2], b"stockade: %s: %s\n" % (what, os.strerror(error.errno or 0).encode()))
            self.control.send(_ENDED.pack(b"E", exec_id, status << 8, 0, 0))
        else:
            self.running[pid] = (exec_id, _start_ticks(pid))
        finally:
            os.chdir("/")

    def reap(self):
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            entry = self.running.pop(pid, None)
            if entry is not None:  # others are orphans, whose nearest living ancestor is this process
                cpu_ns = int((usage.ru_utime + usage.ru_stime) * 1e9)
                self.control.send(_ENDED.pack(b"E", entry[0], status, cpu_ns, usage.ru_maxrss * 1024))

    def kill(self, exec_id):
        """End one exec with all it started, also what left its session by a double fork.

        Everything that is not older than the exec goes, except the trees of the other live execs. Stop first,
        kill then, until a pass finds nothing: a fork bomb loses that race because stopped processes don't fork.
        """
        own = [pid for pid, (running, _) in self.running.items() if running == exec_id]
        since = min((self.running[pid][1] for pid in own), default=None)
        if since is None:
            return
        others = {pid for pid, (running, _) in self.running.items() if running != exec_id}
        for _ in range(50):
            doomed = _doomed(since, others)
            if not doomed:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in doomed:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        pass
            self.reap()
            time.sleep(0.002)
        os.kill(-1, signal.SIGKILL)


def _search(program, path):
    """Find a program as execvp(3) does, in the PATH that the command gets and not in this process's own."""
    if b"/" in program:
        return program
    denied = False
    for folder in path.split(b":"):
        candidate = os.path.join(folder, program)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            denied = True
    number = errno.EACCES if denied else errno.ENOENT
    raise OSError(number, os.strerror(number))


def _complain(fd, text):
    """Write to a command's standard error without ever waiting for it."""
    os.set_blocking(fd, False)
    try:
        os.write(fd, text)
    except OSError:
        pass


def _stat(pid):
    """Parent and start time (clock ticks since boot) of a process, or None (proc_pid_stat(5))."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), int(fields[19])


def _start_ticks(pid):
    entry = _stat(pid)
    return 0 if entry is None else entry[1]


def _doomed(since, others):
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            entry = _stat(int(name))
            if entry is not None:
                table[int(name)] = entry
    doomed = []
    for pid, (_, start) in table.items():
        ancestor = pid
        while ancestor in table and ancestor not in others:
            ancestor = table[ancestor][0]
        if start >= since and ancestor not in others:
            doomed.append(pid)
    return doomed


def main():
    _undumpable()
    _limit(sys.argv[1:])
    Guest().serve()


if __name__ == "__main__":
    main()
