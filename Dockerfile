# Two images: one that serves on CPUs, one on NVIDIA GPUs.
#
#   docker build --target cpu -t turnout:cpu .
#   docker run --rm -p 30000:30000 turnout:cpu                      # the bundled model
#
#   docker build --target cuda -t turnout:cuda .
#   docker run --rm --gpus all --ipc=host -p 30000:30000 -v /models:/models:ro turnout:cuda serve /models/MODEL
#
# docker/install.sh holds the steps; the tests run it as it is. Triton and CUDA compile kernels on first use: keep
# /var/cache/turnout in a volume, and a new container starts with what the last one compiled.

FROM python:3.12-slim-bookworm AS cpu
ARG TORCH_INDEX_URL=""
COPY . /src
RUN /src/docker/install.sh cpu /opt/turnout && cp /src/docker/healthcheck.py /opt/turnout/ && rm -rf /src
RUN useradd --uid 10001 --no-create-home turnout && install -d -o turnout /var/cache/turnout
USER turnout
ENV PATH=/opt/turnout/bin:$PATH XDG_CACHE_HOME=/var/cache/turnout TURNOUT_HOST=0.0.0.0 TURNOUT_PORT=30000
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "/opt/turnout/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["turnout"]
CMD ["serve", "demo"]

FROM python:3.12-slim-bookworm AS cuda
ARG TORCH_INDEX_URL=""
# Triton compiles a small launcher with the C compiler of the system.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN /src/docker/install.sh cuda /opt/turnout && cp /src/docker/healthcheck.py /opt/turnout/ && rm -rf /src
RUN useradd --uid 10001 --no-create-home turnout && install -d -o turnout /var/cache/turnout
USER turnout
ENV PATH=/opt/turnout/bin:$PATH XDG_CACHE_HOME=/var/cache/turnout TRITON_CACHE_DIR=/var/cache/turnout/triton \
    TURNOUT_HOST=0.0.0.0 TURNOUT_PORT=30000
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s CMD ["python", "/opt/turnout/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["turnout"]
CMD ["serve", "demo"]
