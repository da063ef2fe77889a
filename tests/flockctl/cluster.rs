//! A cluster by its URL: every subcommand goes to the node that it is about, or to all of them.

use std::process::Command;

use flock_tests::on_own_servers;
use flock_tests::server::Builder;
use flock_tests::topology::Cluster;
use serde_json::Value;

use crate::scene::{finish, flockctl, hold};

on_own_servers![every_subcommand_takes_a_cluster];

fn every_subcommand_takes_a_cluster(builder: Builder) {
    let cluster = Cluster::start(&builder, 3);
    let nodes = &cluster.nodes;
    // One of the nodes is enough: it names the others.
    let ask = |args: &[&str]| -> Command {
        let mut command = flockctl(&nodes[0], args);
        command.env("FLOCK_URL", format!("valkey+cluster://{}", nodes[0].addr()));
        command
    };
    let keys = ["a", "b", "c", "d", "e", "f"];
    let owners: Vec<_> = keys.map(|key| cluster.owner_of(key)).into();
    assert!((0..3).all(|node| owners.contains(&node)), "{owners:?}");
    for (key, node) in keys.iter().zip(&owners) {
        hold(&nodes[*node], key, "alice");
    }
    let list: Value = serde_json::from_str(&finish(ask(&["ls", "--json"])).out).unwrap();
    let listed: Vec<_> = list.as_array().unwrap().iter().map(|lock| lock["key"].as_str().unwrap()).collect();
    assert_eq!(listed, keys);
    let top: Value = serde_json::from_str(&finish(ask(&["top", "--json"])).out).unwrap();
    assert_eq!((&top["stats"]["flock_held"], top["locks"].as_array().unwrap().len()), (&6.into(), 6));
    for key in keys {
        assert!(finish(ask(&["info", key])).out.starts_with(&format!("{key}: exclusive, 1 holding")));
        let run = ["run", "--wait", "0s", key, "true"];
        assert_ne!(finish(ask(&run)).code, Some(0), "it is held");
        assert_eq!(finish(ask(&["revoke", "--yes", key])).out, "1 ended\n");
        assert_eq!(finish(ask(&run)).code, Some(0));
    }
}
