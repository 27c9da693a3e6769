#!/bin/sh
# In a container of Debian 12: makes of the wheels in /wheels, pip's first, /opt/webui and /app/backend, where the official image has it.
set -eu
say() { echo "== $*"; }
export DEBIAN_FRONTEND=noninteractive

say "packages"
apt-get update -q
apt-get install -y -q --no-install-recommends python3

say "virtual environment"
python3 -m venv --without-pip /opt/webui
cd /wheels
pip=$1
shift
/opt/webui/bin/python "$pip/pip" install --no-index --no-deps --no-compile --no-cache-dir --quiet --root-user-action=ignore "$@"

say "how it is started"
# STAND-IN for the official image's start.sh, which is in no wheel: the same server with the same variables.
mkdir -p /app/backend/data
cat >/app/backend/start.sh <<'END'
exec uvicorn open_webui.main:app --host "$HOST" --port "$PORT" --forwarded-allow-ips '*' --workers 1
END

say "byte code"
/opt/webui/bin/python -m compileall -q -j 2 --invalidation-mode unchecked-hash /opt/webui/lib/python3.11/site-packages || true

say "cleaning"
apt-get clean
rm -rf /var/lib/apt/lists/* /tmp/*
say "done"
