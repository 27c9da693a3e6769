#!/bin/sh
# Runs in a container of Debian 12: llama.cpp's server from the source distribution in /source, left in /out/llama-server.
# One file without libraries of its own, for any x86-64-v3 processor, without CUDA, TLS and web page.
set -eu
say() { echo "== $*"; }
JOBS=${1:-2}

say "compilers"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -q -y --no-install-recommends g++ cmake ninja-build >/dev/null

say "unpacking"
mkdir -p /tmp/source
tar -xzf /source/*.tar.gz -C /tmp/source --strip-components=1

say "configuring"
cmake -S /tmp/source/llama.cpp -B /tmp/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
  -DCMAKE_EXE_LINKER_FLAGS="-static-libstdc++ -static-libgcc" -DLLAMA_BUILD_IS_DEV=OFF -DLLAMA_BUILD_NUMBER="$2" -DLLAMA_BUILD_COMMIT=sdist \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
  -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_LTO=OFF

say "compiling llama-server"
nice -n 10 cmake --build /tmp/build --target llama-server -j "$JOBS"
install -s -m 0755 /tmp/build/bin/llama-server /out/llama-server.part
mv /out/llama-server.part /out/llama-server
say "done"
