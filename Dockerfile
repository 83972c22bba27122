# tunebench on a processor, or with the packages for NVIDIA GPUs:
#   docker build -t tunebench .
#   docker build -t tunebench-gpu --build-arg EXTRAS=[cuda,postgres] .
#   docker run --gpus all -v tunebench:/data tunebench-gpu tune gemm:m=1024,n=1024,k=1024,dtype=f16
FROM python:3.12-slim AS build
ARG EXTRAS=[postgres]
COPY . /source
RUN python -m venv /opt/tunebench && /opt/tunebench/bin/pip install --no-cache-dir "/source${EXTRAS}"

FROM python:3.12-slim
# g++ emulates kernels for GPUs that are absent. Debian keeps one version of a package, so that none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 tuner \
    && install -d -o tuner /data
COPY --from=build /opt/tunebench /opt/tunebench
ENV PATH=/opt/tunebench/bin:$PATH TUNEBENCH_DB=/data/tunebench.db TUNEBENCH_CACHE=/data/cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/tuner
VOLUME /data
ENTRYPOINT ["tunebench"]
CMD ["--help"]
