//! `hotlift methods`.

use hotlift_methods::METHODS;

use crate::hotlift::Hotlift;

#[test]
fn every_method_is_listed_with_its_hardware_and_the_table_fits_a_terminal() {
    let (status, said) = Hotlift::start(&["methods"]).wait();
    assert!(status.success(), "{said:?}");
    for method in METHODS {
        let row = said
            .iter()
            .find(|line| line.starts_with(&format!("│ {} ", method.name)));
        let row = row.unwrap_or_else(|| panic!("{} is missing: {said:#?}", method.name));
        let device = method.hardware.map_or("-", |hardware| hardware.device);
        assert!(row.contains(device), "{row}");
        assert!(said.iter().any(|line| line.ends_with(method.summary)));
    }
    let widest = said.iter().map(|line| line.chars().count()).max();
    assert!(widest <= Some(100), "{widest:?}");
}
