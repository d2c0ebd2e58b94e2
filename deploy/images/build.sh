#!/usr/bin/env bash
# Builds Tandem's images with buildah, which needs no container engine and only root in a container;
# with --local-base, no image registry either.
#
#     deploy/images/build.sh [--local-base] [IMAGE ...]     drafter verifier gateway demo-model
#
# --local-base   makes the base image from Debian's packages with mmdebstrap, without pulling; torch
#                then comes from pip's configured index, not from PyTorch's.
# TAG            the images' tag (dev). BASE_IMAGE: the base, as in the Dockerfiles.
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS (a folder), PIP_CERT: passed to pip if set.
# BUILD_IMAGE, FLASH_ATTN_VERSION, FLASH_ATTN_CUDA_ARCHS, MAX_JOBS: for the verifier with flash-attn.
set -euo pipefail
cd "$(dirname "$0")/../.."

export STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}"
tag="${TAG:-dev}"
local_base=localhost/tandem-base:bookworm
arguments=(--isolation chroot --format docker --layers=false)

if [[ "${1:-}" == --local-base ]]; then
    shift
    BASE_IMAGE="$local_base"
    PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL-}"
    arguments+=(--pull-never)
    if ! buildah inspect "$local_base" > /dev/null 2>&1; then
        scratch="$(mktemp -d)"
        trap 'rm -rf "$scratch"' EXIT
        mmdebstrap --variant=essential --include=python3,python3-venv,libstdc++6 \
            --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
            --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$scratch/root.tar"
        container="$(buildah from scratch)"
        buildah add --quiet "$container" "$scratch/root.tar" / > /dev/null
        buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            "$container"
        buildah commit --quiet --rm "$container" "$local_base" > /dev/null
    fi
fi
if [[ -n "${BASE_IMAGE:-}" ]]; then
    arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
fi
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT \
    BUILD_IMAGE FLASH_ATTN_VERSION FLASH_ATTN_CUDA_ARCHS MAX_JOBS; do
    if [[ -n "${!name+given}" ]]; then
        arguments+=(--build-arg "$name=${!name}")
    fi
done
# Files of this machine's pip configuration.
for path in "${PIP_FIND_LINKS:-}" "${PIP_CERT:-}" /etc/ssl/certs; do
    if [[ "$path" == /* && -e "$path" ]]; then
        arguments+=(--volume "$path:$path:ro")
    fi
done
if revision="$(git rev-parse HEAD 2> /dev/null)"; then
    arguments+=(--build-arg "REVISION=$revision")
fi

images=("$@")
if ((${#images[@]} == 0)); then
    images=(demo-model drafter gateway verifier)
fi
for image in "${images[@]}"; do
    echo "== tandem-$image:$tag"
    buildah build "${arguments[@]}" --file "deploy/docker/$image.Dockerfile" \
        --tag "localhost/tandem-$image:$tag" .
done
for image in "${images[@]}"; do
    bytes="$(buildah images --format '{{.Size}}' "localhost/tandem-$image:$tag")"
    echo "localhost/tandem-$image:$tag $bytes"
done
