#!/bin/sh
# Prints the first usable Python among its arguments, or explains on stderr what is missing.
#
# Usable means CPython 3.11 to 3.13 (the versions that every locked dependency has wheels for)
# with the venv and ensurepip modules. Version managers put commands on PATH that exist and fail,
# so each candidate has to run.
set -u

probe='
import sys
found = sys.version_info[:2]
if not (3, 11) <= found < (3, 14):
    sys.exit("is Python %d.%d" % found)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no venv module (Debian, Ubuntu: apt install python%d.%d-venv)" % found)
print(sys.executable)
'

seen=""
for candidate in "$@"; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    answer=$("$candidate" -c "$probe" 2>&1)
    case $? in
        0) printf '%s\n' "$answer"; exit 0 ;;
        1) reason=$(printf '%s\n' "$answer" | tail -n 1) ;;
        *) reason="does not run" ;;
    esac
    seen="$seen
  $candidate $reason"
done

printf 'Flash-MSA Operator needs Python 3.11, 3.12 or 3.13 with its venv module.\n' >&2
printf 'Looked for: %s. Found:%s\n' "$*" "${seen:- none of them}" >&2
printf 'Install one, or name it: make PYTHON=/path/to/python3.12 ...\n' >&2
exit 1
