# The lab's other side of the network: a container registry and the double of the model hub.
ARG BASE
FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
RUN echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/lab \
 && apt-get update \
 && apt-get install -y --no-install-recommends docker-registry python3 \
 && apt-get clean && rm -rf /var/lib/apt/lists/* /etc/dpkg/dpkg.cfg.d/lab
COPY registry.yml /etc/docker/registry/config.yml
COPY hub.py hub-entrypoint.sh /usr/local/lib/specrig/
RUN mkdir -p /srv/hub
EXPOSE 5000 8081
ENTRYPOINT ["/usr/local/lib/specrig/hub-entrypoint.sh"]
