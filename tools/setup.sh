#!/usr/bin/env bash
# Make .venv, or bring it up to date:  tools/setup.sh PART…
# A part is a file requirements/PART.txt; "programs" are the clients that the tests drive through the proxy (apt).
# Environment: PYTHON=path chooses the interpreter, STOCKADE_NO_APT=1 forbids apt.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022 # whoever runs the tests as an ordinary user must be able to read what is installed here

note() { printf 'setup: %s\n' "$*" >&2; }

# apt where it may be used: root, or sudo that asks nothing. Whatever fails is a notice, never the end.
apt_install() {
  local sudo=()
  [ -z "${STOCKADE_NO_APT:-}" ] || { note "apt is switched off; going on without: $*"; return 0; }
  command -v apt-get >/dev/null || { note "there is no apt-get; going on without: $*"; return 0; }
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || { note "apt needs root or sudo; going on without: $*"; return 0; }
    sudo=(sudo -n)
  fi
  note "apt-get install $*"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null 2>&1 ||
    { "${sudo[@]}" apt-get update -q >/dev/null 2>&1 &&
      "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null; } ||
    note "apt could not install all of: $*"
}

usable() { "$1" -I -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# The system's interpreter comes first: one under a private home cannot be run by the ordinary user of `make test`.
find_python() {
  local name path
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && { printf '%s\n' "$PYTHON"; return 0; }
    note "PYTHON=$PYTHON is not a Python of 3.11 or newer with venv"
    return 1
  fi
  for name in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do
    path=$(command -v "$name") || continue
    usable "$path" && { printf '%s\n' "$path"; return 0; }
  done
  return 1
}

if ! .venv/bin/python -I -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
  rm -rf .venv
  # Debian ships python3 without ensurepip; the system's own interpreter is worth one question to apt.
  [ -n "${PYTHON:-}" ] || usable /usr/bin/python3 || apt_install python3 python3-venv
  python=$(find_python) || {
    note "no Python of 3.11 or newer with the venv module was found: install python3 and python3-venv, or set PYTHON"
    exit 2
  }
  note "making .venv with $python ($("$python" -V))"
  "$python" -m venv .venv
fi

files=(-r requirements/build.txt)
bare=()
for part in "$@"; do
  case $part in
    humaneval) bare+=(-r requirements/humaneval.txt) ;;
    programs) programs=1 ;;
    *) files+=(-r "requirements/$part.txt") ;;
  esac
done

pip() { .venv/bin/python -I -m pip --disable-pip-version-check --no-input "$@"; }
note "installing: $*"
pip install --quiet "${files[@]}"
[ ${#bare[@]} -eq 0 ] || pip install --quiet --no-deps "${bare[@]}"
pip install --quiet --no-deps --no-build-isolation --editable .

if [ -n "${programs:-}" ]; then
  missing=()
  for pair in curl:curl git:git wget:wget ip:iproute2 openssl:openssl ssh:openssh-client node:nodejs npm:npm; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
  [ -x /usr/sbin/dropbear ] || missing+=(dropbear-bin) # an SSH server that comes without a service
  # pyseccomp compiles the filter again through this library and compares the bytes.
  .venv/bin/python -I -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")' 2>/dev/null || missing+=(libseccomp2)
  [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}" ca-certificates
fi
