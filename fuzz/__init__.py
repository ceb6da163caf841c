"""Coverage-guided fuzzing of everything that reads bytes of the guest, of an origin or of a name server.

``python -m fuzz NAME [--minutes N]`` runs one target, ``python -m fuzz`` all of them one after another, ``--list`` names
them. A target is a function of bytes that raises where the code under it breaks a promise; most of them ask an
independent parser too (h11, llhttp, OpenSSL, dnspython). atheris mutates what is in ``corpus/NAME`` and follows the
coverage of the package.

The targets need no atheris: ``tests/fuzz`` runs each of them over every file of the corpus, so that whatever was found
once is looked at in every run of the tests.
"""

from __future__ import annotations
