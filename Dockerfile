# SuperScaler on NVIDIA GPUs, with torch's own CUDA. Build: docker build -t superscaler .
# Run: docker run --gpus all --ipc host --rm superscaler train gpt2:size=tiny --plan data_parallel --cluster local:2 --steps 20
FROM python:3.12-slim
# Inductor and Triton compile with it.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /superscaler
COPY . .
RUN pip install --no-cache-dir '.[hf]'
WORKDIR /work
ENTRYPOINT ["superscaler"]
