# Restoration on a CPU with PyTorch and a package compiled ahead of time; no compiler in the image.
#   docker build -f docker/torch-cpu.Dockerfile --build-arg MODEL=gpen-open-512 -t gpen-core:torch-cpu .
#   docker run --rm --read-only --tmpfs /tmp:exec --network none -v "$PWD/in:/in:ro" -v "$PWD/out:/out" \
#       gpen-core:torch-cpu enhance /in -o /out --weights /weights/model.pt2
# The package is for processors like the one that builds the image; another one is refused in a sentence.
# PyTorch unpacks it in /tmp, or where TMPDIR says, so that must be there and allow execution.
# The health check restores a face: the package is for this machine, can be unpacked and runs.

FROM python:3.11-slim-bookworm AS packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN python -m venv --without-pip /opt/gpen \
    && pip --python /opt/gpen/bin/python install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
        -r docker/requirements-torch.txt \
    && pip --python /opt/gpen/bin/python install --no-cache-dir --no-deps . \
    && rm -rf /opt/gpen/lib/python3.11/site-packages/torch/include /opt/gpen/lib/python3.11/site-packages/torch/test

# The full image has the C++ compiler, and the same Python at the same place.
FROM python:3.11-bookworm AS model
ARG MODEL=gpen-open-512
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r docker/requirements-torch.txt "onnx>=1.16" \
    && pip install --no-cache-dir --no-deps .
RUN mkdir /weights \
    && gpen-core export "$MODEL" --format pt2 -o /weights/model.pt2 \
    && GPEN_CORE_HOME=/weights gpen-core weights pull centerface

FROM python:3.11-slim-bookworm
COPY --from=packages /opt/gpen /opt/gpen
COPY --from=model /weights /weights
ENV PATH=/opt/gpen/bin:$PATH \
    GPEN_CORE_HOME=/weights \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1
RUN mkdir /out && chown 10001:10001 /out
USER 10001:10001
WORKDIR /out
HEALTHCHECK --interval=5m --timeout=60s CMD ["gpen-core", "doctor", "--weights", "/weights/model.pt2"]
ENTRYPOINT ["gpen-core"]
CMD ["--help"]
