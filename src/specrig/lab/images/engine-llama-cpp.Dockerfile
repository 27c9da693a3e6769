# The lab's llama.cpp: one binary on a plain Debian, where the official image has it.
ARG BASE
FROM ${BASE}
COPY llama-server /app/llama-server
RUN chmod 0755 /app/llama-server && /app/llama-server --version
ENTRYPOINT ["/app/llama-server"]
