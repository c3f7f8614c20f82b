//! `hotlift drain`: which domain is moved, and what is said of one that was not.

use crate::scripted_virsh::{HERE, Hosts};

const B: &str = "qemu+ssh://b/system";

#[test]
fn a_domain_whose_name_is_another_ones_id_is_moved_and_the_other_stays() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(101, "other", "running");
    hosts.domain(7, "101", "running");
    let (code, said) = hosts.hotlift(&["drain", "--to=b", "--domain=101"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(hosts.names(B), ["101"], "{said}");
    assert_eq!(hosts.names(HERE), ["other"], "{said}");
}
