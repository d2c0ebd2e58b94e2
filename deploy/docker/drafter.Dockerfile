# The drafter's image: the packages of its extra, its folder, and the folders that it imports. Built
# from the repository's root:
#     docker build -f deploy/docker/drafter.Dockerfile -t tandem-drafter .

ARG BASE_IMAGE=docker.io/library/python:3.12-slim-bookworm

# Creates the environment; only /opt/tandem of this stage is kept.
FROM ${BASE_IMAGE} AS build
WORKDIR /build
COPY deploy/docker/requirements.py pyproject.toml constraints.txt ./
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
# pip has its own environment, so the result has no pip. The packages' test suites are removed.
RUN python3 -m venv installer \
    && python3 -m venv --without-pip /opt/tandem \
    && python3 requirements.py pyproject.toml drafter otel > requirements.txt \
    && installer/bin/pip --python /opt/tandem/bin/python install --no-cache-dir \
        --constraint constraints.txt --requirement requirements.txt \
    && find /opt/tandem -type d -name tests -prune -exec rm -rf {} +
COPY tandem/__init__.py /opt/tandem/app/tandem/
COPY tandem/v1 /opt/tandem/app/tandem/v1
COPY servicekit /opt/tandem/app/servicekit
COPY drafter /opt/tandem/app/drafter
# The root file system is read-only at run time. The kernels are compiled here, on x86-64 for all
# processors with AVX2, with AVX-512 and with VNNI too, elsewhere for the processor of the build: a
# new container serves in about a second.
WORKDIR /opt/tandem/app
RUN python3 -m compileall -q . && /opt/tandem/bin/python -m drafter.warm_up

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-drafter" \
      org.opencontainers.image.description="Tandem's drafter: token histories and n-gram proposals" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/tandem /opt/tandem
# Files are written to /tmp only: a tmpfs or an emptyDir. If the image's kernels do not fit the
# processor, others are compiled and cached there.
ENV PATH=/opt/tandem/bin:${PATH} \
    PYTHONPATH=/opt/tandem/app \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NUMBA_CACHE_DIR=/tmp/numba \
    TANDEM_DRAFTER_LISTEN=0.0.0.0:50051 \
    TANDEM_DRAFTER_METRICS_LISTEN=0.0.0.0:9101 \
    TANDEM_DRAFTER_HEALTH_LISTEN=0.0.0.0:50061
WORKDIR /opt/tandem/app
USER 65532:65532
EXPOSE 50051 9101 50061
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "servicekit.probe", "127.0.0.1:50061", "--service", "tandem.liveness"]
ENTRYPOINT ["python", "-m", "drafter"]
