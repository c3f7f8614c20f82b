//! Tests the memory use of a connection.

use std::thread;

use hotlift_tls::fixed::ends;
use hotlift_tls::{CONNECTION_MEMORY, RECORDS_PER_KEY, Slices};

use crate::support::{connected, hotlift};

#[test]
fn buffers_of_both_directions_stay_within_the_limit_under_load() {
    let [(client_socket, mut client), (server_socket, mut server)] =
        <[_; 2]>::from(connected(&hotlift()));
    assert!(
        client.opener.memory() + client.sealer.memory() < 4096,
        "nothing was sent yet"
    );
    let data = vec![7; 3 << 20];
    thread::scope(|scope| {
        for (mut socket, session) in [(&client_socket, &mut client), (&server_socket, &mut server)]
        {
            let (opener, sealer) = (&mut session.opener, &mut session.sealer);
            let data = &data;
            scope.spawn(move || sealer.send(&mut socket, &mut Slices::new(&[data])).unwrap());
            scope.spawn(move || {
                let mut got = vec![0; data.len()];
                opener.read_exact(&mut socket, &mut got).unwrap();
                assert!(got == *data);
            });
        }
    });
    for session in [&client, &server] {
        let memory = session.opener.memory() + session.sealer.memory();
        assert!(memory <= CONNECTION_MEMORY, "{memory}");
    }
}

#[test]
fn a_direction_with_little_traffic_uses_little_memory() {
    let [mut client, mut server] = ends(0, RECORDS_PER_KEY);
    for _ in 0..1000 {
        let mut sent = Vec::new();
        client
            .sealer
            .send(&mut sent, &mut Slices::new(&[[1; 100]]))
            .unwrap();
        let mut from = &sent[..];
        let n = server.opener.plaintext(&mut from).unwrap().len();
        server.opener.consume(n);
    }
    assert!(client.sealer.memory() < 1024, "{}", client.sealer.memory());
    assert!(server.opener.memory() <= 4096, "{}", server.opener.memory());
}
