"""A small local stand-in for node agent and broker: runs programs in temporary folders and isolates nothing.

It is a process of its own, started before torch is imported, so that the trainer under test starts none. One request
a line, one answer a line: ``{"sides": [{"files", "argv", "stdin"}, ...], "timeout_s"}``, where two sides are joined by
two pipes as the broker joins them, is answered with ``{"sides": [{"files", "stdout", "code"}, ...]}``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import sys
import tempfile
from pathlib import Path

LINE_LIMIT = 1 << 22
LIMITS = ["prlimit", "--cpu=4:4", f"--as={512 << 20}", f"--fsize={1 << 20}", "--core=0"]
JOINED = 3, 4


async def run_side(side: dict, ends: tuple[int, int] | None, timeout_s: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="stockade-double-") as name:
        folder = Path(name)
        for path, data in side["files"].items():
            inside(folder, path).parent.mkdir(parents=True, exist_ok=True)
            inside(folder, path).write_bytes(base64.b64decode(data))
        argv = [str(inside(folder, word)) if word.startswith("/workspace") else word for word in side["argv"]]
        argv[0] = sys.executable

        def join() -> None:
            for end, place in zip(ends or (), JOINED, strict=False):
                os.dup2(end, place)

        process = await asyncio.create_subprocess_exec(
            *LIMITS, *argv, cwd=folder, env={}, stdin=-1, stdout=-1, stderr=-3, close_fds=False, preexec_fn=join
        )
        for end in ends or ():
            os.close(end)
        try:
            stdout, _ = await asyncio.wait_for(process.communicate(base64.b64decode(side["stdin"])), timeout_s)
        except TimeoutError:
            stdout = b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        files = {
            f"/workspace/{path.relative_to(folder)}": base64.b64encode(path.read_bytes()).decode()
            for path in folder.rglob("*")
            if path.is_file()
        }
        return {"files": files, "stdout": base64.b64encode(stdout).decode(), "code": process.returncode}


def inside(folder: Path, path: str) -> Path:
    return folder / path.removeprefix("/workspace").lstrip("/")


def high_pipe() -> tuple[int, int]:
    """A pipe whose ends do not lie where the child's ends go."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]


async def run(request: dict) -> dict:
    sides: list[dict] = request["sides"]
    ends: list[tuple[int, int] | None] = [None]
    if len(sides) == 2:
        (first_in, second_out), (second_in, first_out) = high_pipe(), high_pipe()
        ends = [(first_in, first_out), (second_in, second_out)]
    done = await asyncio.gather(
        *(run_side(side, end, request["timeout_s"]) for side, end in zip(sides, ends, strict=True))
    )
    return {"sides": done}


async def main(path: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        writer.write(json.dumps(await run(request)).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=LINE_LIMIT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # The end of stdin is the end of the one who started us.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
