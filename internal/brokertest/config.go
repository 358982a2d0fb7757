package brokertest

import "bytes"

// enabledPlugins is the content of the enabled_plugins file of every broker that is started here.
const enabledPlugins = "[rabbitmq_management,rabbitmq_prometheus].\n"

// commonConfig is what every broker that is started here has in its rabbitmq.conf, local or in Docker. A full disk of
// the machine must not block publishers, and guest comes from outside of a container. A cluster notices a silent peer
// after eight seconds instead of sixty, and one that keeps its metadata in Mnesia heals without an operator.
const commonConfig = `loopback_users = none
disk_free_limit.absolute = 50MB
net_ticktime = 8
cluster_partition_handling = autoheal
`

// joinConfig is what a node has in its rabbitmq.conf to join another's cluster at its first start.
func joinConfig(first string) string {
	return "cluster_formation.peer_discovery_backend = classic_config\n" +
		"cluster_formation.classic_config.nodes.1 = " + first + "\n"
}

// lastLines cuts a log down to what fits an error.
func lastLines(log []byte) []byte {
	const most = 2000
	if len(log) > most {
		log = log[len(log)-most:]
	}
	return bytes.TrimSpace(log)
}
