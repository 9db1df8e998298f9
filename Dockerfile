# Image of Octavo's server for CPUs. `make image` builds it and tries it.
#
#   docker run --rm --read-only --tmpfs /tmp -v octavo-cache:/cache -p 8000:8000 octavo \
#       serve MODEL --host 0.0.0.0
#
# The process has no rights and writes to /cache (models, packed weights) and /tmp only.

FROM debian:trixie-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
WORKDIR /source
COPY . .
# Without byte code, which is a fifth of the packages' size; the cache volume keeps it instead.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir build cmake ninja \
    && /opt/build/bin/python -m build --wheel --outdir /wheels \
    && python3 -m venv --without-pip /opt/octavo \
    && /opt/build/bin/pip --python /opt/octavo/bin/python install --no-cache-dir --no-compile /wheels/*.whl \
    && find /opt/octavo -name tests -type d -path '*/site-packages/numpy/*' -prune -exec rm -r {} +

FROM debian:trixie-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /cache octavo \
    && mkdir /cache \
    && chown octavo /cache
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONPYCACHEPREFIX=/cache/python
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=5m --interval=10s --timeout=5s CMD ["python3", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["octavo"]
CMD ["serve", "octavo/stories", "--host", "0.0.0.0"]
