#!/bin/sh
# Two servers in one container: when either ends, so does the container.
docker-registry serve /etc/docker/registry/config.yml &
registry=$!
python3 /usr/local/lib/specrig/hub.py /srv/hub 8081 &
hub=$!
trap 'kill $registry $hub; exit 0' TERM INT
while kill -0 $registry 2>/dev/null && kill -0 $hub 2>/dev/null; do
    sleep 1 &
    wait $!
done
exit 1
