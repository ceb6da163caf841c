"""Isolation cases about files and sockets with a path: what is not in the mount table cannot be opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stockade.errors import SandboxFault
from stockade.policy import Mount

READ = "say([attempt(lambda: open(path).read()) for path in ARGS])"
CONNECT = """
def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(path)
        return sock.recv(100).decode()
say([attempt(connect, path) for path in ARGS])
"""
FIND = """
found = []
for top, folders, names in os.walk("/", onerror=lambda _: None):
    if top.startswith(("/proc", "/sys")) or (ARGS[1] and not top.startswith(ARGS[1]) and not ARGS[1].startswith(top)):
        folders.clear()
        continue
    found += [os.path.join(top, name) for name in [*names, *folders] if name in ARGS[0]]
say(found)
"""


@pytest.mark.promise("S2.1")
def test_a01_credentials_in_the_home(node):
    paths = node.facts["credentials"]
    assert node.plain(READ, paths) == [node.token] * len(paths)
    assert node.careless(READ, paths) == [node.token] * len(paths)
    assert node.inside(READ, paths) == ["ENOENT"] * len(paths)


@pytest.mark.promise("S2.1")
def test_a01_credentials_are_nowhere(node):
    """Not under another path either: the whole tree is searched by name."""
    names = sorted(
        {os.path.basename(path) for path in node.facts["credentials"]} - {"config.json", "config", "settings"}
    )
    home = str(Path(node.facts["credentials"][0]).parents[1])
    assert len(node.plain(FIND, [names, home])) == len(names)  # the host's own tree is large: only the home is searched
    assert not [path for path in node.inside(FIND, [names, ""]) if not path.startswith(("/usr/", "/lib"))]


@pytest.mark.promise("S2.1")
@pytest.mark.parametrize("case", ["A5", "A6", "A10", "A11"])
def test_a05_a06_a10_a11_scheduler_bus_and_container_sockets(node, case):
    paths = node.facts["sockets"][case]
    assert node.plain(CONNECT, paths) == [node.token] * len(paths)
    # A read-only bind stops writing to a socket's inode, not connecting to it.
    assert node.careless(CONNECT, paths) == [node.token] * len(paths)
    before = node.reached()
    assert node.inside(CONNECT, paths) == ["ENOENT"] * len(paths)
    assert node.reached() == before


@pytest.mark.promise("S2.1")
def test_a09_agent_sockets(node):
    paths = node.facts["sockets"]["A9"]
    assert node.careless(CONNECT, paths) == [node.token] * len(paths)
    assert node.inside(CONNECT, paths) == ["ENOENT"] * len(paths)


def test_a06_a08_a23_spool_tickets_and_shared_memory(node):
    """Job scripts and credentials of slurmd, Kerberos tickets, /dev/shm of the job."""
    paths = node.facts["files"]
    assert node.careless(READ, paths) == [node.token] * len(paths)
    assert node.inside(READ, paths) == ["ENOENT"] * len(paths)


def test_a05_slurm_programs_have_nobody_to_talk_to(node):
    source = 'say([name for name in ("/etc/slurm", "/etc/munge", "/run", "/var", "/home", "/root", "/sys", "/mnt", "/opt") if os.path.exists(name)])'
    assert {"/run", "/var", "/home", "/sys"} <= set(node.careless(source))
    assert node.inside(source) == []


DEVICES = (
    *(
        "kvm",
        "fuse",
        "net/tun",
        "mem",
        "kmsg",
        "vhost-net",
        "vhost-vsock",
        "uinput",
        "loop-control",
        "loop0",
        "sda",
        "vda",
    ),
    *(
        "infiniband/uverbs0",
        "infiniband/rdma_cm",
        "cxi0",
        "nvidia0",
        "nvidiactl",
        "nvidia-uvm",
        "dri/card0",
        "kfd",
        "hpet",
        "port",
    ),
)


def test_a20_a21_a22_devices(node):
    """Every node under /dev is one of the harmless ones; what this machine has beside them does not exist inside."""
    listing = """
    found = {}
    for top, folders, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(top, name)
            status = os.lstat(path)
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                found[path] = [os.major(status.st_rdev), os.minor(status.st_rdev)]
    say([found, [attempt(os.open, "/dev/" + name, os.O_RDONLY | os.O_NONBLOCK) for name in ARGS]])
    """.replace("\n    ", "\n")
    outside, _ = node.careless(listing, DEVICES)
    found, tried = node.inside(listing, DEVICES)
    harmless = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx"}
    assert {path for path in found if not path.startswith("/dev/pts/")} <= harmless
    assert set(outside) - harmless, "this machine has no other device to show"
    assert tried == ["ENOENT"] * len(DEVICES)


def test_a22_devices_cannot_be_made(node):
    source = 'say([attempt(os.mknod, "/workspace/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1)), attempt(os.mknod, "/workspace/vda", stat.S_IFBLK | 0o600, os.makedev(254, 0))])'
    if os.geteuid() == 0:  # for others the kernel itself refuses, with or without a sandbox
        made = source.replace("/workspace/", node.facts["credentials"][0] + "-")
        assert node.plain(made) == ["done", "done"]
    assert node.inside(source) == ["EPERM", "EPERM"]


PROC_WRITES = (
    *("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sysrq-trigger"),
    *("/proc/sys/fs/binfmt_misc/register", "/sys/kernel/uevent_helper", "/proc/sys/vm/overcommit_memory"),
    *(
        "/proc/sys/kernel/unprivileged_userns_clone",
        "/proc/sys/user/max_user_namespaces",
        "/proc/sys/net/ipv4/ip_forward",
    ),
    *(
        "/proc/irq/default_smp_affinity",
        "/proc/1/oom_score_adj",
        "/proc/sys/kernel/randomize_va_space",
        "/proc/timer_list",
    ),
)


def test_a37_a39_kernel_settings(node):
    """Opened for writing, nothing written. For an ordinary user most are shut outside as well; for root none is."""
    source = "say([attempt(os.open, path, os.O_WRONLY) for path in ARGS])"
    assert set(node.inside(source, PROC_WRITES)) <= {"EROFS", "EACCES", "ENOENT", "EPERM"}
    if os.geteuid() == 0:
        assert node.plain(source, PROC_WRITES).count("done") >= 6


def test_a38_control_groups(node):
    source = 'say([os.path.exists("/sys/fs/cgroup"), attempt(os.listdir, "/sys"), attempt(libc, "mount", b"x", b"/tmp", b"cgroup2", 0, None)])'
    assert node.careless(source)[0]
    assert node.inside(source) == [False, "ENOENT", "EPERM"]


def test_a39_kernel_memory_and_keys(node):
    """Where the file exists it must say nothing: no address of the kernel, no key of the uid, no memory."""
    source = """
def read(path):
    with open(path, "rb", 0) as file:
        return file.read(4096).decode("latin-1")
say({path: attempt(read, path) for path in ARGS})
"""
    found = node.inside(
        source, ["/proc/kcore", "/proc/kmsg", "/proc/kallsyms", "/proc/kpagecount", "/proc/sched_debug"]
    )
    addresses = {line.split()[0] for line in found.pop("/proc/kallsyms").splitlines() if " " in line}
    assert addresses <= {"0" * 16}
    assert set(found.values()) <= {"EACCES", "EPERM", "ENOENT", ""}
    if os.geteuid() == 0:
        assert len(node.plain(source, ["/proc/kpagecount"])["/proc/kpagecount"]) > 100


def test_a42_the_runtimes_own_binary(node):
    """CVE-2019-5736: overwrite what runs the sandbox, through a link that leads to it."""
    source = 'say([attempt(os.open, path, os.O_WRONLY) for path in ("/proc/self/exe", "/proc/1/exe", "/sandbox/agent.py", ARGS)])'
    answers = node.inside(source, "/usr/bin/env")
    assert set(answers) <= {"EROFS", "ETXTBSY", "EACCES"}
    assert answers[2] == "EROFS"
    planted = node.facts["credentials"][0]  # the careless way: what runs, and its scripts, are writable for their owner
    assert node.plain(source, planted)[3] == "done"


def test_a44_a_link_swapped_in_for_a_mount(owner, tmp_path):
    """CVE-2024-42472's class: the checked directory is a link to another one when it is mounted."""
    private, source = tmp_path / "private", tmp_path / "data"
    private.mkdir()
    (private / "key").write_text("SECRET")
    source.mkdir()
    for path in (tmp_path, private, source):
        path.chmod(0o755)
    sandbox = owner.create(mounts=(Mount(source=str(source), target="/data"),))
    assert owner.inside(sandbox, "say(os.listdir('/data'))") == []
    source.rename(tmp_path / "before")
    source.symlink_to(private)
    assert (source / "key").read_text() == "SECRET"  # whoever walks the path now arrives there
    with pytest.raises(SandboxFault, match="symbolic link"):
        owner.create(mounts=(Mount(source=str(source), target="/data"),))
    assert owner.inside(sandbox, "say(os.listdir('/data'))") == []  # a descriptor's mount stays what it was
    owner.destroy(sandbox)


WRITES = """
def write(path):
    with open(path, "w") as file:
        file.write("x")
say([attempt(write, path) for path in ARGS])
"""


def test_a47_read_only_system(node):
    paths = [
        "/usr/x",
        "/usr/bin/x",
        "/bin/x",
        "/lib/x",
        "/etc/x",
        "/etc/passwd",
        "/etc/ld.so.preload",
        "/x",
        "/sandbox/x",
        "/dev/x",
    ]
    answers = node.inside(WRITES, paths)
    assert answers == ["EROFS"] * len(paths)
    planted = [node.facts["credentials"][0]]
    assert node.plain(WRITES, planted) == ["done"]
    assert node.inside(WRITES, planted) == ["ENOENT"]


def test_a47_mounts_and_other_sandboxes(owner, tmp_path):
    """A policy's mount is read-only whatever its mode; two sandboxes share no writable place."""
    source = tmp_path / "data"
    source.mkdir()
    source.chmod(0o777)
    tmp_path.chmod(0o755)
    first = owner.create(mounts=(Mount(source=str(source), target="/data"),))
    second = owner.create()
    assert owner.inside(first, WRITES, ["/data/x", "/data/../data/y"]) == ["EROFS", "EROFS"]
    (source / "z").write_text("works without the mount's flag")
    places = ["/workspace/x", "/tmp/x", "/dev/shm/x", "/sandbox/home/x"]
    assert owner.inside(first, WRITES, places) == ["done"] * 4
    assert owner.inside(second, "say([path for path in ARGS if os.path.exists(path)])", places) == []
    owner.destroy(first)
    owner.destroy(second)


def test_a43_mounts_do_not_propagate(node):
    """Nothing can be mounted inside, and what the launcher's namespaces hold is private: no shared peer group."""
    source = """
lines = [line.split() for line in open("/proc/self/mountinfo")]
say([[line[4] for line in lines if any(word.startswith(("shared:", "master:")) for word in line[6:line.index("-")])],
     attempt(libc, "mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)])
"""
    shared, mounted = node.inside(source)
    assert shared == []
    assert mounted == "EPERM"


def test_a66_persistence(node):
    """Start-up files of a home are written, and are not those of any home outside."""
    names = [
        ".bashrc",
        ".ssh/authorized_keys",
        ".config/systemd/user/x.service",
        ".local/lib/python3.11/site-packages/usercustomize.py",
    ]
    source = """
def plant(name):
    path = os.path.join(os.environ.get("HOME", "/"), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write("planted")
say([attempt(plant, name) for name in ARGS])
"""
    home = Path(node.facts["credentials"][0]).parents[1]
    assert node.inside(source, names) == ["done"] * 4
    assert not any((home / name).exists() for name in names)
    assert node.plain(source, names) == ["done"] * 4
    assert all((home / name).exists() for name in names)


def test_a69_neighbours_through_the_mount_table(node):
    """Paths of the host that mountinfo names lead nowhere: they are words about another mount namespace."""
    source = 'say([attempt(os.listdir, line.split()[3]) for line in open("/proc/self/mountinfo") if line.split()[3].startswith(("/home", "/root", "/tmp", "/run", "/workspace"))])'
    assert set(node.inside(source)) <= {"ENOENT", "done"}
    assert "done" in node.plain("say([attempt(os.listdir, ARGS)])", str(Path(node.facts["credentials"][0]).parent))
