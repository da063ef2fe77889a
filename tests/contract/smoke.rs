//! The module loads, and a server with it is still a server.

use flock_tests::on_shared_servers;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::Server;

on_shared_servers![server_with_the_module_answers, module_is_listed];

fn server_with_the_module_answers(server: &Server, protocol: Protocol) {
    let mut conn = server.connect(protocol);
    assert_eq!(conn.cmd(&["PING"]), Reply::Simple("PONG".into()));
}

fn module_is_listed(server: &Server, protocol: Protocol) {
    let mut conn = server.connect(protocol);
    let modules = conn.cmd(&["MODULE", "LIST"]);
    let is_ours = |module: &Reply| *module.field("name") == Reply::bulk("flock");
    assert!(modules.as_array().iter().any(is_ours), "{modules}");
}
