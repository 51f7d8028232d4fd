# CPU:   docker build -t deepstack .
# CUDA:  docker build -t deepstack --build-arg TORCH_INDEX=https://download.pytorch.org/whl/<cuda> .
#        with the CUDA version that pytorch.org offers for the torch of constraints.txt. Every other
#        package is checked by its hash; torch itself only on a CPU.
# Run:   docker run --rm -v "$PWD/results:/study/results" deepstack train quick
FROM python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/deepstack
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY deepstack deepstack
COPY deepstack_lab deepstack_lab
COPY configs configs
RUN case "$TORCH_INDEX" in */cpu) ;; *) \
        pip install --no-cache-dir "$(grep -o '^torch==[^ ]*' requirements/run.lock)" \
            --index-url "$TORCH_INDEX" ;; esac \
    && pip install --no-cache-dir --require-hashes --extra-index-url "$TORCH_INDEX" \
        -r requirements/run.lock \
    && pip install --no-cache-dir --no-deps . \
    && rm -rf /opt/deepstack
WORKDIR /study
# The kernels for this machine's processor; on another one a container compiles its own.
RUN deepstack check quick runtime.device=cpu runtime.replay=native
ENTRYPOINT ["deepstack"]
CMD ["--help"]
