# Runs a recipe from any working directory mounted at /work:
#   docker build -t esmshard .
#   docker run --rm --gpus all -v "$PWD:/work" esmshard finetune contact
# BASE may be NVIDIA's PyTorch image; its torch is then used as it is.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --system-site-packages /opt/esmshard
# torch is the large layer and changes least; it comes first.
COPY constraints.txt ./
RUN /opt/esmshard/bin/pip install -c constraints.txt torch
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY esmshard ./esmshard
COPY recipes ./recipes
COPY data ./data
RUN /opt/esmshard/bin/pip install -c constraints.txt '.[h5,plots]'

FROM ${BASE}
# Without the verbs libraries NCCL falls back from InfiniBand to TCP.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/esmshard /opt/esmshard
ENV PATH=/opt/esmshard/bin:$PATH ESMSHARD_CACHE=/tmp/esmshard MPLCONFIGDIR=/tmp/matplotlib
RUN useradd --create-home --uid 1000 esmshard
USER esmshard
WORKDIR /work
ENTRYPOINT ["tini", "--", "esmshard"]
CMD ["--help"]
