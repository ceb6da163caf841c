"""``python -m stockade.agent --ready-fd N``: the specification on standard input, the answer on descriptor N."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping

from stockade.agent._node import dumps, run_agent

_LAST_S = 5.0


def main() -> int:
    """Run a node agent."""
    parser = argparse.ArgumentParser(
        prog="stockade.agent", description="The node agent of a run; started by stockade.connect()."
    )
    parser.add_argument("--ready-fd", type=int, required=True)
    ready: int = parser.parse_args().ready_fd
    logging.basicConfig(level=logging.WARNING, format="stockade agent: %(message)s", stream=sys.stderr)
    spec = sys.stdin.buffer.read()

    def tell(message: Mapping[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError), open(ready, "wb") as file:  # the owner may be gone already
            file.write(dumps(message))

    async def run() -> int:
        code = await run_agent(spec, tell)
        # The record is closed and every sandbox is dead; a task that will not end must not keep the process.
        asyncio.get_running_loop().call_later(_LAST_S, os._exit, code)
        return code

    os.set_inheritable(ready, False)
    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
