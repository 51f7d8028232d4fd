# CPU:   docker build -t deepstack .
# CUDA:  docker build -t deepstack --build-arg TORCH_INDEX=https://download.pytorch.org/whl/<cuda> .
#        with the CUDA version that pytorch.org offers for the torch of constraints.txt.
# Run:   docker run --rm -v "$PWD/results:/study/results" deepstack train quick
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/deepstack
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY deepstack deepstack
COPY configs configs
RUN torch=$(grep '^torch==' constraints.txt) \
    && pip install --no-cache-dir "$torch" --index-url "$TORCH_INDEX" \
    && pip install --no-cache-dir -c constraints.txt . \
    && rm -rf /opt/deepstack
WORKDIR /study
ENTRYPOINT ["deepstack"]
CMD ["--help"]
