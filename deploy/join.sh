#!/bin/sh
# join.sh NAME [OVERRIDES...]: joins the swarm of compose.yaml under that host name.
set -eu
name="$1"
shift
exec /opt/swarm/bin/swarm join "$(cat /var/lib/swarm/link/link)" /var/lib/swarm/state \
  --set "name=${name}" \
  --set exchange.listen=0.0.0.0:7700 \
  --set "exchange.advertise=${name}:7700" \
  --set directory.listen=/ip4/0.0.0.0/tcp/7701 \
  --set telemetry.metrics_listen=0.0.0.0:9100 \
  --set telemetry.log_format=json \
  "$@"
