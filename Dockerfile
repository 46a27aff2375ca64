# esmshard with every extra and its own tests, for any directory mounted at /work.
#
# Build (BuildKit: Docker 23 or newer, or podman):
#   docker build -t esmshard .                                        CUDA, torch as PyPI has it
#   docker build -t esmshard --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .     CPU; or .../whl/cu126
#   docker build -t esmshard --build-arg BASE=nvcr.io/nvidia/pytorch:YY.MM-py3 .                NVIDIA's torch as it is
# An NVIDIA image older than esmshard's floor for torch stops the build with a sentence. Only with such a base is there a C
# compiler: `parallel.compile: true` on a GPU needs one, and the slim image has none.
#
# Run and test:
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" --user "$(id -u):$(id -g)" esmshard finetune contact
#   docker run --rm esmshard test                                     the CPU suite, as it was shipped
#   docker run --rm --gpus all --ipc host esmshard test -m gpu        the tests that need a GPU; any argument of pytest
# `--ipc host` (or --shm-size 8g) because NCCL exchanges data through /dev/shm, of which a container has 64 MB.
#
# Any --user works: what is written lies in /tmp (caches, HOME) and /work, so `--read-only --tmpfs /tmp:exec` and
# `--network none` work as well. Downloaded weights stay with -v "$HOME/.cache/huggingface:/tmp/.cache/huggingface".
# InfiniBand needs --device /dev/infiniband --ulimit memlock=-1 besides.
#
# Pinned: the base by its tag, torch by constraints.txt, all else by deploy/image/lock.txt (`make lock`). torch's own
# metadata pins the CUDA libraries. /opt/esmshard/sbom.cdx.json lists the Python packages; Debian's are in `dpkg -l`.
ARG BASE=python:3.11.14-slim-bookworm

# What changes least comes first: a change of esmshard's source reuses all of this stage.
FROM ${BASE} AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Without the verbs libraries NCCL falls back from InfiniBand to TCP, and says so only at NCCL_DEBUG=INFO.
# Debian and Ubuntu have different versions of these, and drop old ones with every security fix: a pin would break the build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini libibverbs1 ibverbs-providers librdmacm1 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/debconf/*-old /var/cache/ldconfig /var/log/*
# No pip inside: the base image's installs into it, and NVIDIA's has no ensurepip.
# `--no-deps` from TORCH_INDEX: an index without this release is an error, and no other package comes from there.
ARG TORCH_INDEX=""
RUN --mount=type=bind,source=constraints.txt,target=/build/constraints.txt \
    python -m venv --without-pip --system-site-packages /opt/esmshard \
    && if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then \
           echo "torch: the base image's own"; exit 0; \
       fi \
    && if [ -n "$TORCH_INDEX" ]; then \
           python -m pip --python /opt/esmshard/bin/python install \
               --no-deps --index-url "$TORCH_INDEX" --constraint /build/constraints.txt torch; \
       fi \
    && python -m pip --python /opt/esmshard/bin/python install --constraint /build/constraints.txt torch
RUN --mount=type=bind,source=deploy/image/dependencies.py,target=/build/dependencies.py \
    --mount=type=bind,source=deploy/image/lock.txt,target=/build/lock.txt \
    python /build/dependencies.py list /build/lock.txt > /tmp/requirements.txt \
    && python -m pip --python /opt/esmshard/bin/python install --requirement /tmp/requirements.txt \
    && rm /tmp/requirements.txt

# The wheel, and the list of what is installed with it. The tools for both stay in this stage.
FROM packages AS build
# An empty PIP_CONSTRAINT: NVIDIA's image sets one, for its own packages.
RUN --mount=type=bind,source=deploy/image/tools.txt,target=/build/tools.txt \
    python -m venv --without-pip /opt/tools \
    && PIP_CONSTRAINT="" python -m pip --python /opt/tools/bin/python install --requirement /build/tools.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY esmshard ./esmshard
COPY recipes ./recipes
COPY data ./data
RUN /opt/tools/bin/python -m hatchling build --target wheel --directory /dist \
    && python -m pip --python /opt/esmshard/bin/python install --no-deps --no-index /dist/*.whl \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /dist/sbom.cdx.json \
           /opt/esmshard/bin/python

FROM packages
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    --mount=type=bind,source=deploy/image/dependencies.py,target=/build/dependencies.py \
    python -m pip --python /opt/esmshard/bin/python install --no-deps --no-index /dist/*.whl \
    && /opt/esmshard/bin/python /build/dependencies.py check
# The suite tests the installed package, which stands in for the clone's sources. Modes are set because a clone made under
# a strict umask would leave files that only root can read. /work without a mount has to take any user's run.
COPY pyproject.toml /opt/esmshard/suite/
COPY tests /opt/esmshard/suite/tests
COPY benchmarks /opt/esmshard/suite/benchmarks
COPY docs /opt/esmshard/suite/docs
COPY deploy/image/left_out.txt /opt/esmshard/suite/
COPY --chmod=0755 deploy/image/entrypoint /opt/esmshard/bin/entrypoint
COPY --from=build /dist/sbom.cdx.json /opt/esmshard/sbom.cdx.json
RUN package="$(/opt/esmshard/bin/python -c 'import esmshard; print(esmshard.__path__[0])')" \
    && ln -s "$package" /opt/esmshard/suite/esmshard \
    && ln -s "$package/_shipped/data" /opt/esmshard/suite/data \
    && ln -s "$package/_shipped/recipes" /opt/esmshard/suite/recipes \
    && chmod -R a+rX,go-w /opt/esmshard/suite /opt/esmshard/sbom.cdx.json \
    && install -d -m 1777 /work

# USER and LOGNAME are for getpass, which otherwise needs a line in /etc/passwd.
ENV PATH=/opt/esmshard/bin:$PATH \
    HOME=/tmp USER=esmshard LOGNAME=esmshard \
    ESMSHARD_CACHE=/tmp/esmshard MPLCONFIGDIR=/tmp/matplotlib \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="esmshard" \
      org.opencontainers.image.description="Fine-tune protein language models (ESM-2, ESM-C and others), sharded, from one recipe." \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}"
# A number, not a name: the cluster can then see that it is not root, and NVIDIA's image has a uid 1000 of its own.
USER 1000:0
WORKDIR /work
ENTRYPOINT ["tini", "--", "/opt/esmshard/bin/entrypoint"]
CMD ["--help"]
