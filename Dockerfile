# osd serve in a container; docs/how_to/serve.md has the commands, also for a GPU.
FROM python:3.11-slim
# g++ compiles the decoding steps for the CPU that the container runs on.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --create-home --uid 1000 osd
WORKDIR /opt/osd_jax
COPY . .
ARG EXTRAS=serve,llama,gguf
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
USER 1000
WORKDIR /home/osd
EXPOSE 8000
ENTRYPOINT ["osd"]
CMD ["serve", "--host", "0.0.0.0"]
