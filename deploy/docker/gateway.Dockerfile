# The gateway's image: the packages of its extra, its folder, and the folders that it imports. Built
# from the repository's root:
#     docker build -f deploy/docker/gateway.Dockerfile -t tandem-gateway .

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
    && python3 requirements.py pyproject.toml gateway otel > requirements.txt \
    && installer/bin/pip --python /opt/tandem/bin/python install --no-cache-dir \
        --constraint constraints.txt --requirement requirements.txt \
    && find /opt/tandem -type d -name tests -prune -exec rm -rf {} +
COPY tandem/__init__.py tandem/declared.py tandem/messages.py tandem/speculation_note.py \
    tandem/values.py /opt/tandem/app/tandem/
COPY tandem/v1 /opt/tandem/app/tandem/v1
COPY servicekit /opt/tandem/app/servicekit
COPY gateway /opt/tandem/app/gateway
# The root file system is read-only at run time.
RUN python3 -m compileall -q /opt/tandem/app

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-gateway" \
      org.opencontainers.image.description="Tandem's gateway: coordinates drafters and verifiers, over gRPC and HTTP" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/tandem /opt/tandem
# Files are written to /tmp only: a tmpfs or an emptyDir.
ENV PATH=/opt/tandem/bin:${PATH} \
    PYTHONPATH=/opt/tandem/app \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    TANDEM_GATEWAY_HTTP_LISTEN=0.0.0.0:8000 \
    TANDEM_GATEWAY_LISTEN=0.0.0.0:50050 \
    TANDEM_GATEWAY_METRICS_LISTEN=0.0.0.0:9100 \
    TANDEM_GATEWAY_HEALTH_LISTEN=0.0.0.0:50060
WORKDIR /opt/tandem/app
USER 65532:65532
EXPOSE 50050 9100 50060 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "servicekit.probe", "127.0.0.1:50060", "--service", "tandem.liveness"]
ENTRYPOINT ["python", "-m", "gateway"]
