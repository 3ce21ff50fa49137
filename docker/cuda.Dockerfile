# Restoration on an NVIDIA GPU with PyTorch; the driver comes from the host (nvidia-container-toolkit).
#   docker build -f docker/cuda.Dockerfile --build-arg MODEL=weights/mine.safetensors -t gpen-core:cuda .
#   docker run --rm --gpus all --read-only --tmpfs /tmp:exec -v "$PWD/in:/in:ro" -v "$PWD/out:/out" gpen-core:cuda \
#       enhance /in -o /out --device cuda --weights /weights/model.safetensors
# A GPU is not visible while an image is built, so a pt2 package or a compile cache for it is made once by
# `gpen-core export` or `gpen-core compile` in a running container, and mounted.

FROM python:3.11-slim-bookworm AS packages
ARG MODEL=gpen-open-512
WORKDIR /src
COPY . .
# Without PyTorch's CPU index pip takes the wheel with CUDA.
RUN python -m venv --without-pip /opt/gpen \
    && pip --python /opt/gpen/bin/python install --no-cache-dir -r docker/requirements-torch.txt \
    && pip --python /opt/gpen/bin/python install --no-cache-dir --no-deps .
RUN pip install --no-cache-dir -r requirements-onnx.txt "onnx>=1.16" && pip install --no-cache-dir --no-deps . \
    && mkdir /weights \
    && if [ -f "$MODEL" ]; then cp "$MODEL" /weights/model.safetensors; \
       else cp "$(gpen-core weights path "$MODEL")" /weights/model.safetensors; fi \
    && GPEN_CORE_HOME=/weights gpen-core weights pull centerface

FROM python:3.11-slim-bookworm
COPY --from=packages /opt/gpen /opt/gpen
COPY --from=packages /weights /weights
ENV PATH=/opt/gpen/bin:$PATH \
    GPEN_CORE_HOME=/weights \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1
RUN mkdir /out && chown 10001:10001 /out
USER 10001:10001
WORKDIR /out
HEALTHCHECK --interval=60s --timeout=60s CMD ["python", "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
ENTRYPOINT ["gpen-core"]
CMD ["--help"]
