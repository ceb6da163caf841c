"""The environment's helper: numbers that only a service outside the sandbox knows."""

import json
import os

RATES_URL = "http://rates.stockade.internal:0"
FETCHED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fetched.json")


def get(name: str) -> int:
    """Return the number called ``name``, asked for once and written down in ``fetched.json``."""
    known = {}
    if os.path.exists(FETCHED):
        with open(FETCHED) as file:
            known = json.load(file)
    if name not in known:
        known[name] = _ask(name)
        with open(FETCHED, "w") as file:
            json.dump(known, file)
    return int(known[name])


def _ask(name: str) -> int:
    # Late: grading finds the file, and a third of a program's time would go into this import.
    from urllib.request import urlopen

    with urlopen(RATES_URL + "/v1/" + name, timeout=10) as answer:  # noqa: S310 - the address is ours
        return int(json.load(answer)["value"])
