# Phalanx on CPUs; for GPUs: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t phalanx .
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch.compile builds code with a C++ compiler; ssh starts runs on other hosts.
RUN apt-get update && apt-get install -y --no-install-recommends g++ openssh-client && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch --index-url $TORCH_INDEX
COPY . /src
RUN pip install --no-cache-dir '/src[hf,data,datasets,s3,watch]' && rm -rf /src
WORKDIR /work
ENTRYPOINT ["phalanx"]
