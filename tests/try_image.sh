#!/usr/bin/env bash
# Builds the image and tries it as a user would: without rights, with a read-only root.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=${CONTAINER_TOOL:-$(command -v docker || command -v podman)} || { echo "make image needs docker or podman" >&2; exit 1; }
"$tool" build -t octavo .
megabytes=$(($("$tool" image inspect -f '{{.Size}}' octavo) / 1000000))
echo "image: $megabytes MB"
[ "$megabytes" -le 300 ] || { echo "the image is larger than 300 MB" >&2; exit 1; }
name=octavo-try-$$
trap '"$tool" rm -f $name > /dev/null' EXIT
"$tool" run -d --name $name --read-only --tmpfs /tmp --tmpfs /cache:uid=10001 --cap-drop ALL -p 127.0.0.1::8000 octavo > /dev/null
address=$("$tool" port $name 8000 | head -n 1)
for _ in $(seq 300); do
  curl -sf "http://$address/ready" > /dev/null && break
  sleep 0.1
done
curl -sf "http://$address/v1/completions" -H 'Content-Type: application/json' \
  -d '{"model": "octavo/stories", "prompt": "Once upon a time", "max_tokens": 16}'
echo
[ "$("$tool" exec $name id -u)" = 10001 ]
