# STAND-IN for an engine's image: Python, and the commands that start the real one.
ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3-minimal libpython3-stdlib && apt-get clean && rm -rf /var/lib/apt/lists/*
RUN mkdir -p /opt/stand-in && printf '#!/bin/sh\nexec python3 /opt/stand-in/engine.py vllm "$@"\n' > /usr/local/bin/vllm && chmod 755 /usr/local/bin/vllm \
 && mkdir -p /usr/lib/python3/dist-packages/vllm/entrypoints/openai && cd /usr/lib/python3/dist-packages/vllm \
 && touch __init__.py entrypoints/__init__.py entrypoints/openai/__init__.py \
 && printf 'import os, sys\nos.execv(sys.executable, ["python3", "/opt/stand-in/engine.py", "python3", "-m", "vllm.entrypoints.openai.api_server", *sys.argv[1:]])\n' \
    > entrypoints/openai/api_server.py
