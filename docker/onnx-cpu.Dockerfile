# Restoration on a CPU with onnxruntime alone; PyTorch only exports the model while the image is built.
#   docker build -f docker/onnx-cpu.Dockerfile --build-arg MODEL=gpen-open-512 -t gpen-core:onnx-cpu .
#   docker run --rm --read-only --network none -v "$PWD/in:/in:ro" -v "$PWD/out:/out" gpen-core:onnx-cpu \
#       enhance /in -o /out --weights /weights/model.onnx
# The health check restores a face.
# MODEL: a name of the catalog, or a converted file inside the build context.

FROM python:3.11-slim-bookworm AS model
ARG MODEL=gpen-open-512
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r docker/requirements-torch.txt "onnx>=1.16" \
    && pip install --no-cache-dir --no-deps .
RUN mkdir /weights \
    && gpen-core export "$MODEL" --format onnx -o /weights/model.onnx \
    && GPEN_CORE_HOME=/weights gpen-core weights pull centerface

FROM python:3.11-slim-bookworm AS packages
WORKDIR /src
COPY . .
RUN python -m venv --without-pip /opt/gpen \
    && pip --python /opt/gpen/bin/python install --no-cache-dir --no-compile -r requirements-onnx.txt \
    && pip --python /opt/gpen/bin/python install --no-cache-dir --no-compile --no-deps .

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
HEALTHCHECK --interval=5m --timeout=60s CMD ["gpen-core", "doctor", "--weights", "/weights/model.onnx"]
ENTRYPOINT ["gpen-core"]
CMD ["--help"]
