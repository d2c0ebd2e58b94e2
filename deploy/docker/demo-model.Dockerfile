# The bundled model as an image, for trying Tandem out: it copies the model into a volume and ends.
# Built from the repository's root:
#     docker build -f deploy/docker/demo-model.Dockerfile -t tandem-demo-model .
ARG BASE_IMAGE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-demo-model" \
      org.opencontainers.image.description="The small model that Tandem comes with" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0 AND PSF-2.0"
COPY examples/demo_model/LICENSE-PSF.txt examples/demo_model/model /model/
# A new volume mounted there belongs to this user.
RUN install -d -o 65532 -g 65532 /models
USER 65532:65532
HEALTHCHECK NONE
ENTRYPOINT ["cp", "-r", "/model/.", "/models/demo"]
