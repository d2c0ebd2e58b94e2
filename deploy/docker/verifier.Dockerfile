# The verifier's image: the packages of its extra, its folder, and the folders that it imports. Built
# from the repository's root:
#     docker build -f deploy/docker/verifier.Dockerfile -t tandem-verifier .
# For GPUs, a CUDA base and PyPI's torch, which includes the CUDA libraries:
#     docker build -f deploy/docker/verifier.Dockerfile -t tandem-verifier:cuda \
#         --build-arg BASE_IMAGE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04 \
#         --build-arg PIP_EXTRA_INDEX_URL= .
# With flash-attn, also a base that has CUDA's compiler, for the stage that installs:
#         --build-arg BUILD_IMAGE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#         --build-arg FLASH_ATTN_VERSION=2.8.3
ARG BASE_IMAGE=docker.io/library/python:3.12-slim-bookworm
# Of the same distribution: the environment's Python is the base's.
ARG BUILD_IMAGE=${BASE_IMAGE}

# Creates the environment; only /opt/tandem of this stage is kept.
FROM ${BUILD_IMAGE} AS build
WORKDIR /build
# CUDA bases have no Python.
# hadolint ignore=DL3008
RUN python3 -m venv --help > /dev/null 2>&1 || { apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*; }
COPY deploy/docker/requirements.py pyproject.toml constraints.txt ./
# The index of torch's CPU build; without it pip installs the CUDA build, several GB.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
# pip has its own environment, so the result has no pip. The packages' test suites are removed.
RUN python3 -m venv installer \
    && python3 -m venv --without-pip /opt/tandem \
    && python3 requirements.py pyproject.toml verifier otel > requirements.txt \
    && installer/bin/pip --python /opt/tandem/bin/python install --no-cache-dir \
        --constraint constraints.txt --requirement requirements.txt \
    && find /opt/tandem -type d -name tests -prune -exec rm -rf {} +
# Empty: no flash-attn. It is compiled against the torch that is installed, for these compute
# capabilities; a compiler takes up to 8 GB, and MAX_JOBS of them run at a time.
ARG FLASH_ATTN_VERSION
ARG FLASH_ATTN_CUDA_ARCHS=80;90
ARG MAX_JOBS=4
# hadolint ignore=DL3008
RUN test -z "${FLASH_ATTN_VERSION}" || { apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && export PATH="/opt/tandem/bin:${PATH}" \
    && installer/bin/pip --python /opt/tandem/bin/python install --no-cache-dir \
        --constraint constraints.txt ninja packaging psutil setuptools wheel \
    && FLASH_ATTENTION_FORCE_BUILD=TRUE installer/bin/pip --python /opt/tandem/bin/python install \
        --no-cache-dir --constraint constraints.txt --no-build-isolation \
        "flash-attn==${FLASH_ATTN_VERSION}" \
    && installer/bin/pip --python /opt/tandem/bin/python uninstall --yes ninja wheel; }
COPY tandem/__init__.py tandem/declared.py tandem/messages.py tandem/values.py \
    /opt/tandem/app/tandem/
COPY tandem/v1 /opt/tandem/app/tandem/v1
COPY servicekit /opt/tandem/app/servicekit
COPY verifier /opt/tandem/app/verifier
# The root file system is read-only at run time. The kernels of Tandem's own decoder and of sampling
# are compiled here for all types of weights, on x86-64 for all processors with AVX2 and again for
# all with AVX-512, without VNNI and with it, elsewhere for the processor of the build.
WORKDIR /opt/tandem/app
RUN python3 -m compileall -q . && /opt/tandem/bin/python -m verifier.warm_up

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-verifier" \
      org.opencontainers.image.description="Tandem's verifier: runs the model and verifies the drafts" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# CUDA bases have no Python; and Triton compiles the launchers of its kernels with gcc.
# hadolint ignore=DL3008
RUN command -v python3 > /dev/null || { apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/tandem /opt/tandem
# Files are written to /tmp only: a tmpfs or an emptyDir. There a restarted container finds that its
# model was checked against transformers, and kernels, if the image's do not fit the processor.
ENV PATH=/opt/tandem/bin:${PATH} \
    PYTHONPATH=/opt/tandem/app \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NUMBA_CACHE_DIR=/tmp/numba \
    HF_HUB_OFFLINE=1 \
    TANDEM_VERIFIER_LISTEN=0.0.0.0:50052 \
    TANDEM_VERIFIER_METRICS_LISTEN=0.0.0.0:9102 \
    TANDEM_VERIFIER_HEALTH_LISTEN=0.0.0.0:50062
WORKDIR /opt/tandem/app
USER 65532:65532
EXPOSE 50052 9102 50062
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "servicekit.probe", "127.0.0.1:50062", "--service", "tandem.liveness"]
ENTRYPOINT ["python", "-m", "verifier"]
